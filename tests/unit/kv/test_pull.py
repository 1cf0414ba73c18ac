"""The decode side of one hand-over, with a scripted prefill worker and a scripted mover."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from attrs import define, field

from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.worker import KvTransferInfo
from commutator.errors import EngineUnavailableError
from commutator_engine_kit.kv.transfer.protocol import (
    DecodeTransferParams,
    ExportedMemory,
    ExportState,
    ExportUpdate,
    ReadyBlock,
    handover_keys,
)
from commutator_engine_kit.kv.transfer.puller import Pull, PullTimes
from commutator_engine_kit.kv.transfer.reader import PromptBlock, ReadTarget
from commutator_engine_kit.kv.transfer.sources import Connection, Sources

INFO = KvTransferInfo(protocol="pull-1", identity="weights", block_size=4, token_bytes=8)
REQUEST = GenerateRequest(request_id="r", token_ids=list(range(30)), sampling=SamplingParams())
BLOCKS = [ReadyBlock(number, key, 0) for number, key in enumerate(handover_keys(INFO, REQUEST))]
SOURCE = ExportedMemory(INFO, "agent", b"metadata", "DRAM", 0, 32, 100)


class Prefill(Connection):
    """Answers "watch" from a script, and with silence when that is over."""

    def __init__(self, script: list[ExportUpdate | Exception]) -> None:
        super().__init__("there:1")
        self.script = script
        self.asked: list[str] = []

    @property
    def connected(self) -> bool:
        return True

    async def start(self) -> None:
        pass

    async def ask(self, what: str, arguments: Any, *, timeout_s: float) -> Any:
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


@define(slots=False)
class Mover:
    bad: frozenset[int] = frozenset()
    fetched: list[int] = field(factory=list)

    async def fetch(
        self,
        source: ExportedMemory,
        blocks: Sequence[PromptBlock],
        target: ReadTarget,
        timeout_s: float,
    ) -> list[str | None]:
        target.begin()
        await asyncio.sleep(0)
        target.end()
        self.fetched += [position for position, _ in blocks]
        return ["damaged" if position in self.bad else None for position, _ in blocks]

    @property
    def nixl_bytes(self) -> int:
        return 0

    def forget(self, source: ExportedMemory) -> None:
        raise AssertionError("it is still there")


def running(*blocks: ReadyBlock) -> ExportUpdate:
    return ExportUpdate(ExportState.RUNNING, blocks)


COMPLETE = ExportUpdate(ExportState.COMPLETE)


async def pulled(
    script: Sequence[ExportUpdate | Exception],
    *,
    mover: Mover | None = None,
    first_token: int = 0,
    timeout_s: float = 60.0,
) -> Pull:
    client = Prefill(list(script))
    mover = mover or Mover()
    sources = Sources(lambda _: client, forget=mover.forget, hello_timeout_s=1.0)
    params = DecodeTransferParams("id", "there:1", 4, timeout_s)
    pull = Pull(params, REQUEST, INFO, sources, mover, PullTimes())
    end = 28
    pull.set_destination(ReadTarget(first_token, end, tuple(range((end - first_token) // 4))))
    async with asyncio.timeout(60):
        await pull.run()
    return pull


async def test_blocks_are_read_as_they_are_announced() -> None:
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
        (ExportUpdate(ExportState.FAILED, reason="it was aborted"), "it was aborted"),
        (EngineUnavailableError("connection lost"), "connection lost"),
        (running(BLOCKS[3]), "another prompt"),
        (running(*BLOCKS, ReadyBlock(9, b"more than the prompt has", 0)), "another prompt"),
    ],
)
async def test_failures_of_the_prefill_worker_are_reported(
    news: ExportUpdate | Exception, error: str
) -> None:
    pull = await pulled([running(*BLOCKS[:2]), news])
    assert pull.error is not None
    assert error in pull.error
    assert pull.good_tokens in {0, 8}


async def test_silence_is_a_failure_in_time() -> None:
    pull = await pulled([running(*BLOCKS[:2])], timeout_s=0.05)
    assert pull.error == "the KV did not arrive within 0.05 s"


async def test_answers_that_are_none_fail_it() -> None:
    client = Prefill([])
    mover = Mover()

    async def nonsense(what: str, arguments: Any, *, timeout_s: float) -> Any:
        return {"blocks": "many"}

    client.ask = nonsense  # type: ignore[method-assign]
    sources = Sources(lambda _: client, forget=mover.forget, hello_timeout_s=1.0)
    params = DecodeTransferParams("id", "there:1", 4, 60.0)
    pull = Pull(params, REQUEST, INFO, sources, mover, PullTimes())
    await pull.run()
    assert pull.error is not None
    assert "no valid ExportedMemory" in pull.error

"""One hand-over, seen from the decode side: ask for blocks, have them read, until all are there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from attrs import asdict, define, field, frozen

from commutator.engine.handover.geometry import BlockShapes
from commutator.engine.handover.handover_keys import handover_keys
from commutator.engine.handover.mover import BlockMover, PromptBlock, Target
from commutator.engine.handover.pull_style import PullHandover
from commutator.engine.handover.pull_words import (
    DecodeWords,
    ExportNews,
    ExportState,
    ReadyBlock,
    Source,
    Watch,
)
from commutator.engine.handover.sources import Sources
from commutator.errors import EngineError, EngineHandoverError
from commutator.types import GenerateRequest, HandoverInfo

__all__ = ["Pull", "PullTimes"]


@frozen
class PullTimes:
    """How long to wait for what."""

    poll_s: float = 1.0
    """The prefill worker says at least so often that it is there."""
    silence_s: float = 5.0
    """One that says nothing for so long beyond that is given up."""
    hello_s: float = 30.0
    """The first question of all: a prefill worker sets NIXL up to answer it."""


@define(eq=False)
class Pull:
    """Runs once. Afterwards ``good_tokens`` and ``error`` say what came of it."""

    words: DecodeWords
    request: GenerateRequest
    own: HandoverInfo
    sources: Sources
    mover: BlockMover
    times: PullTimes
    good_tokens: int = 0
    """Tokens of the target, from its beginning, whose KV is there and verified."""
    size_bytes: int = 0
    """What was read."""
    read_s: float = 0.0
    """From the first block that was begun to be read to the end."""
    error: str | None = None
    _target: asyncio.Future[Target] = field(init=False)
    _told: list[ReadyBlock] = field(factory=list)
    _told_all: bool = False
    _news: asyncio.Event = field(factory=asyncio.Event)
    _good: set[int] = field(factory=set)
    _ends_s: float = 0.0

    def __attrs_post_init__(self) -> None:
        self._target = asyncio.get_running_loop().create_future()

    def aim(self, target: Target) -> None:
        """Say where the blocks are to go; until then, they are only asked for."""
        if not self._target.done():
            self._target.set_result(target)

    async def run(self) -> None:
        """Never raises but CancelledError. The prefill side may free the blocks afterwards."""
        self._ends_s = time.monotonic() + self.words.timeout_s
        try:
            async with asyncio.timeout(self.words.timeout_s):
                await self._converse()
        except* EngineError as group:
            self.error = str(_first(group))
        except* TimeoutError:
            self.error = f"the KV was not there after {self.words.timeout_s:g} s"

    async def release(self) -> None:
        """Tell the prefill side; if that gets lost, the lease ends by itself."""
        with suppress(EngineError):
            await self._ask("release", {"id": self.words.pull}, self.times.silence_s)

    async def _converse(self) -> None:
        source = await self.sources.source(self.words.address)
        if (reason := PullHandover().mismatch(source.info, self.own)) is not None:
            raise EngineHandoverError(reason)
        if source.info.block_size != self.words.block_size:
            raise EngineHandoverError(
                f"the prefill worker's blocks are of {source.info.block_size} tokens; it was "
                f"said to be {self.words.block_size}"
            )
        shapes = BlockShapes(
            source.info.block_size, self.own.block_size, self.own.token_bytes, source.runs
        )
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch(source))
            await self._fetch_all(source, shapes, tasks)
            watching.cancel()

    async def _ask(self, what: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        address = self.words.address
        return await self.sources.ask(address, what, arguments, timeout_s=timeout_s)

    async def _watch(self, source: Source) -> None:
        state = ExportState.UNKNOWN
        keys: Sequence[bytes] | None = None
        while True:
            watch = Watch(self.words.pull, len(self._told), state, self.times.poll_s)
            limit_s = self.times.poll_s + self.times.silence_s
            news = _news_in(await self._ask("watch", asdict(watch), limit_s))
            if news.state is ExportState.FAILED:
                raise EngineHandoverError(f"the prefill worker has failed: {news.reason}")
            if keys is None:
                keys = handover_keys(source.info, self.request)
            for block in news.blocks:
                position = len(self._told)
                if position >= len(keys) or block.key != keys[position]:
                    raise EngineHandoverError("the prefill worker computed another prompt")
                self._told.append(block)
            state = news.state
            self._told_all = state is ExportState.COMPLETE
            self._news.set()

    async def _fetch_all(
        self, source: Source, shapes: BlockShapes, tasks: asyncio.TaskGroup
    ) -> None:
        target = await self._target
        position = target.first_token // shapes.source_tokens
        end = target.end_token // shapes.source_tokens
        first, fetches = position, list[asyncio.Task[None]]()
        started_s: float | None = None
        while position < end:
            if len(self._told) <= position:
                if self._told_all:
                    break
                self._news.clear()
                await self._news.wait()
                continue
            started_s = started_s or time.monotonic()
            blocks = list(enumerate(self._told[position:end], position))
            position += len(blocks)

            def note() -> None:
                good = first
                while good in self._good:
                    good += 1
                self.good_tokens = (good - first) * shapes.source_tokens

            fetches.append(tasks.create_task(self._fetch(source, blocks, target, note)))
        await asyncio.gather(*fetches)
        if started_s is not None:
            self.read_s = time.monotonic() - started_s

    async def _fetch(
        self,
        source: Source,
        blocks: list[PromptBlock],
        target: Target,
        note: Callable[[], None],
    ) -> None:
        remaining_s = max(0.001, self._ends_s - time.monotonic())
        outcomes = await self.mover.fetch(source, blocks, target, remaining_s)
        good = [
            position
            for (position, _), problem in zip(blocks, outcomes, strict=True)
            if problem is None
        ]
        self._good.update(good)
        self.size_bytes += source.block_bytes * len(good)
        note()
        if len(good) == len(blocks):
            return
        for (position, _), problem in zip(blocks, outcomes, strict=True):
            if problem is not None:
                raise EngineHandoverError(f"block {position} of the prompt: {problem}")


def _news_in(answer: Any) -> ExportNews:
    try:
        return msgspec.convert(answer, ExportNews)
    except msgspec.ValidationError as error:
        raise EngineHandoverError(f"an answer that is none: {error}") from error


def _first(group: BaseExceptionGroup[EngineError]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found

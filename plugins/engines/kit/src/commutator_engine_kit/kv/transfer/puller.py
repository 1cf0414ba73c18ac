"""The decode worker's side of a hand-over: reads blocks as the prefill worker publishes them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from attrs import define, evolve, field, frozen

from commutator.contract.request import GenerateRequest
from commutator.contract.worker import KvTransferInfo, PullStatistics
from commutator.errors import EngineError, EngineHandoverError
from commutator_engine_kit.kv.groups import KvGroup
from commutator_engine_kit.kv.transfer.protocol import (
    BlockShapes,
    DecodeTransferParams,
    ExportedMemory,
    ExportState,
    ExportUpdate,
    PullHandover,
    ReadyBlock,
    ReleaseRequest,
    WatchRequest,
    handover_keys,
)
from commutator_engine_kit.kv.transfer.reader import BlockMover, PromptBlock, ReadTarget
from commutator_engine_kit.kv.transfer.sources import Sources

log = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")


@frozen
class PullResult:
    """The outcome of a pull. Reads may still write to its blocks until they are released."""

    key: int
    good_tokens: int
    """Tokens at the beginning of the target whose KV has arrived and is verified; with groups, all
    of the target's or 0."""
    error: str | None
    """Why the pull failed; None when it succeeded."""


@frozen
class PullTimes:
    """Time limits for a pull's questions to the exporter."""

    poll_s: float = 1.0
    """The exporter answers a "watch" after this time even if nothing is new."""
    silence_s: float = 5.0
    """The pull fails when an answer is later than expected by this time."""
    hello_s: float = 30.0
    """Limit for the answer to "hello", before which a prefill worker may have to set up NIXL."""


@define(eq=False)
class Pull:
    """Reads one prompt's blocks, once. The result is in ``good_tokens`` and ``error``."""

    params: DecodeTransferParams
    request: GenerateRequest
    own: KvTransferInfo
    sources: Sources
    mover: BlockMover
    times: PullTimes
    groups: Sequence[KvGroup] = ()
    """The model's kinds of KV, where blocks are handed over by groups."""
    good_tokens: int = 0
    """As ``PullResult.good_tokens``."""
    size_bytes: int = 0
    """Bytes that were read and verified."""
    read_s: float = 0.0
    """Seconds from the beginning of the first read to the end of the last one."""
    error: str | None = None
    target: ReadTarget | None = None
    """The blocks to read into; the ``Puller`` resets it when nothing touches them any more."""
    task: asyncio.Task[None] | None = None
    """Executes ``run``; set by the ``Puller``."""
    dropped: bool = False
    _destined: asyncio.Event = field(factory=asyncio.Event)
    _ready: list[ReadyBlock] = field(factory=list)
    """The blocks that the exporter has published."""
    _complete: bool = False
    _news: asyncio.Event = field(factory=asyncio.Event)
    _good: set[int] = field(factory=set)
    _ends_s: float = 0.0

    def set_destination(self, target: ReadTarget) -> None:
        """Read the blocks into ``target``. Until then, the exporter is only watched."""
        self.target = target
        self._destined.set()

    def drop(self) -> None:
        """Cancel the pull; its result is not needed."""
        self.dropped = True
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Raises only CancelledError. Call ``release`` afterwards."""
        self._ends_s = time.monotonic() + self.params.timeout_s
        try:
            async with asyncio.timeout(self.params.timeout_s):
                await self._pull()
        except* EngineError as group:
            self.error = str(_first(group))
        except* TimeoutError:
            self.error = f"the KV did not arrive within {self.params.timeout_s:g} s"

    async def release(self) -> None:
        """Let the exporter free the blocks. If the message is lost, their lease lapses."""
        request = ReleaseRequest(self.params.pull)
        with suppress(EngineError):
            await self._ask("release", request, type(None), self.times.silence_s)

    async def _pull(self) -> None:
        source = await self.sources.memory(self.params.address)
        if (reason := PullHandover().mismatch(source.info, self.own)) is not None:
            raise EngineHandoverError(reason)
        if source.info.block_size != self.params.block_size:
            raise EngineHandoverError(
                f"the prefill worker's blocks have {source.info.block_size} tokens, not "
                f"{self.params.block_size}"
            )
        shapes = BlockShapes(
            source.info.block_size, self.own.block_size, self.own.token_bytes, source.runs
        )
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch(source))
            await self._fetch_all(source, shapes, tasks)
            watching.cancel()

    async def _ask(
        self, what: str, arguments: object, answer: type[AnswerT], timeout_s: float
    ) -> AnswerT:
        address = self.params.address
        return await self.sources.ask(address, what, arguments, answer, timeout_s=timeout_s)

    async def _watch(self, source: ExportedMemory) -> None:
        state = ExportState.UNKNOWN
        keys: Sequence[bytes] | None = None
        while True:
            watch = WatchRequest(self.params.pull, len(self._ready), state, self.times.poll_s)
            limit_s = self.times.poll_s + self.times.silence_s
            news = await self._ask("watch", watch, ExportUpdate, limit_s)
            if news.state is ExportState.FAILED:
                raise EngineHandoverError(f"the prefill worker failed: {news.reason}")
            if keys is None:
                keys = handover_keys(source.info, self.request, self.groups)
            for block in news.blocks:
                position = len(self._ready)
                if position >= len(keys) or block.key != keys[position]:
                    raise EngineHandoverError("the prefill worker computed another prompt")
                self._ready.append(block)
            state = news.state
            self._complete = state is ExportState.COMPLETE
            self._news.set()

    async def _fetch_all(
        self, source: ExportedMemory, shapes: BlockShapes, tasks: asyncio.TaskGroup
    ) -> None:
        await self._destined.wait()
        target = self.target
        assert target is not None
        wanted = _wanted(target, shapes)
        begun = 0
        fetches: list[asyncio.Task[None]] = []
        started_s: float | None = None
        while begun < len(wanted):
            known = bisect_left(wanted, len(self._ready), begun)
            if known == begun:
                if self._complete:
                    break
                self._news.clear()
                await self._news.wait()
                continue
            started_s = started_s or time.monotonic()
            blocks = [(position, self._ready[position]) for position in wanted[begun:known]]
            begun = known
            fetches.append(tasks.create_task(self._fetch(source, shapes, blocks, target)))
        await asyncio.gather(*fetches)
        if started_s is not None:
            self.read_s = time.monotonic() - started_s

    async def _fetch(
        self,
        source: ExportedMemory,
        shapes: BlockShapes,
        blocks: list[PromptBlock],
        target: ReadTarget,
    ) -> None:
        remaining_s = max(0.001, self._ends_s - time.monotonic())
        outcomes = await self.mover.fetch(source, blocks, target, remaining_s)
        problems: dict[int, str] = {}
        for (position, _), problem in zip(blocks, outcomes, strict=True):
            if problem is None:
                self._good.add(position)
            else:
                problems[position] = problem
        self.size_bytes += source.block_bytes * (len(blocks) - len(problems))
        wanted, good = _wanted(target, shapes), 0
        while good < len(wanted) and wanted[good] in self._good:
            good += 1
        if target.positions is None:
            self.good_tokens = good * shapes.source_tokens
        elif good == len(wanted):
            self.good_tokens = target.end_token - target.first_token
        for position, problem in problems.items():
            raise EngineHandoverError(f"block {position} of the prompt: {problem}")


def _wanted(target: ReadTarget, shapes: BlockShapes) -> Sequence[int]:
    """Which of the published blocks are read, in ascending order."""
    if target.positions is not None:
        return target.positions
    size = shapes.source_tokens
    return range(target.first_token // size, target.end_token // size)


class Puller:
    """The pulls of one worker. They run in an event loop; the engine polls for their results.

    ``begin`` to ``poll`` may be called from any thread; ``on_news`` is called in the loop. ``poll``
    returns one ``PullResult`` for each ``begin``, unless the pull was dropped before it ended, and
    one released key for each ``set_destination``, also of dropped pulls.
    """

    def __init__(
        self,
        mover: BlockMover,
        own: KvTransferInfo,
        on_news: Callable[[], None],
        times: PullTimes | None = None,
        groups: Sequence[KvGroup] = (),
    ) -> None:
        """``own`` describes this worker's blocks; ``groups`` are those of GROUPS_PROTOCOL."""
        self._groups = groups
        self._mover = mover
        self._own = own
        self._on_news = on_news
        self._times = times or PullTimes()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sources: Sources | None = None
        self._running: dict[int, Pull] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._over: list[PullResult] = []
        self._released: list[int] = []
        self._counts = PullStatistics()

    def start(self) -> None:
        """Call this in the event loop that runs the pulls."""
        self._loop = asyncio.get_running_loop()
        self._sources = Sources(forget=self._mover.forget, hello_timeout_s=self._times.hello_s)

    def begin(self, key: int, params: DecodeTransferParams, request: GenerateRequest) -> None:
        """Ask for a prompt's blocks; ``key`` names the pull until its blocks are released."""
        self._soon(lambda: self._begin(key, params, request))

    def set_destination(self, key: int, target: ReadTarget) -> None:
        """Read the pull's blocks into ``target``."""
        self._soon(lambda: self._set_destination(key, target))

    def drop(self, key: int) -> None:
        """Cancel a pull. Does nothing when it has ended."""
        self._soon(lambda: self._drop(key))

    def poll(self) -> tuple[list[PullResult], list[int]]:
        """Pulls that ended since the last call, and keys of those whose blocks were released."""
        with self._lock:
            over, self._over = self._over, []
            released, self._released = self._released, []
        return over, released

    def statistics(self) -> PullStatistics:
        with self._lock:
            return evolve(self._counts, nixl_bytes=self._mover.nixl_bytes)

    def stop(self) -> None:
        """Cancel every pull. Call this from any thread except the loop's."""
        if self._loop is not None:
            with suppress(RuntimeError, TimeoutError):
                asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(5.0)

    # What follows runs in the event loop.

    def _begin(self, key: int, params: DecodeTransferParams, request: GenerateRequest) -> None:
        assert self._loop is not None
        assert self._sources is not None
        pull = Pull(
            params, request, self._own, self._sources, self._mover, self._times, self._groups
        )
        self._running[key] = pull
        pull.task = self._loop.create_task(pull.run())
        pull.task.add_done_callback(lambda task: self._ended(key, pull, task))
        with self._lock:
            self._counts = evolve(self._counts, active=self._counts.active + 1)

    def _set_destination(self, key: int, target: ReadTarget) -> None:
        pull = self._running.get(key)
        if pull is None:
            self._report_released(key)  # the pull failed or was dropped before
            return
        target.on_released = lambda: self._release_target(key, pull)
        pull.set_destination(target)

    def _drop(self, key: int) -> None:
        if (pull := self._running.get(key)) is not None:
            pull.drop()

    def _ended(self, key: int, pull: Pull, task: asyncio.Task[None]) -> None:
        assert self._loop is not None
        if self._running.get(key) is pull:
            del self._running[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("pull %s failed unexpectedly", pull.params.pull, exc_info=error)
            pull.error = f"{type(error).__name__}: {error}"
        how = "dropped" if pull.dropped else "succeeded" if pull.error is None else "failed"
        release = self._loop.create_task(pull.release())
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)
        with self._lock:
            counts = self._counts
            self._counts = evolve(
                counts,
                active=counts.active - 1,
                pulled_bytes=counts.pulled_bytes + pull.size_bytes,
                pull_s=counts.pull_s + pull.read_s,
                **{how: getattr(counts, how) + 1},
            )
            if not pull.dropped:
                self._over.append(PullResult(key, pull.good_tokens, pull.error))
        self._release_target(key, pull)
        self._on_news()

    def _release_target(self, key: int, pull: Pull) -> None:
        """Report the target once the pull has ended and no read into it is under way."""
        over = pull.task is not None and pull.task.done()
        if over and pull.target is not None and not pull.target.under_way:
            pull.target = None
            self._report_released(key)

    def _report_released(self, key: int) -> None:
        with self._lock:
            self._released.append(key)
        self._on_news()

    async def _stop(self) -> None:
        for pull in self._running.values():
            pull.drop()
        # The releases of what was cancelled just now begin with the loop's next turn.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if self._releases:
            await asyncio.wait(self._releases, timeout=1.0)
        if self._sources is not None:
            await self._sources.close()

    def _soon(self, call: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(call)


def _first(group: BaseExceptionGroup[EngineError]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found

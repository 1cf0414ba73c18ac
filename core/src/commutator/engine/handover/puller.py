"""The decode side's hand-overs: a thread-safe door between an engine and their event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from attrs import define, evolve, frozen

from commutator.engine.handover.mover import BlockMover, Target
from commutator.engine.handover.pull import Pull, PullTimes
from commutator.engine.handover.pull_words import DecodeWords
from commutator.engine.handover.sources import HandoverClient, Sources
from commutator.engine.handover.statistics import PullStatistics
from commutator.types import GenerateRequest, HandoverInfo

__all__ = ["PullOver", "Puller"]

log = logging.getLogger(__name__)


@frozen
class PullOver:
    """A hand-over has ended. The blocks may still be written to, until they are let go."""

    key: int
    good_tokens: int
    """Of the target, from its beginning; what comes after must not be used."""
    error: str | None


@define(eq=False)
class _Running:
    pull: Pull
    task: asyncio.Task[None] | None = None
    target: Target | None = None
    dropped: bool = False


class Puller:
    """``begin`` to ``poll`` may be called from any thread; ``on_news`` is called from the loop.

    For each ``begin``, ``poll`` returns one ``PullOver``, unless it was dropped before. For each
    ``aim``, it returns the key once among those that were let go, dropped or not.
    """

    def __init__(
        self,
        mover: BlockMover,
        own: HandoverInfo,
        connect: Callable[[str], HandoverClient],
        on_news: Callable[[], None],
        times: PullTimes | None = None,
    ) -> None:
        self._mover = mover
        self._own = own
        self._connect = connect
        self._on_news = on_news
        self._times = times or PullTimes()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sources: Sources | None = None
        self._running: dict[int, _Running] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._over: list[PullOver] = []
        self._let_go: list[int] = []
        self._counts = PullStatistics()

    def start(self) -> None:
        """From the event loop that will ask and answer."""
        self._loop = asyncio.get_running_loop()
        self._sources = Sources(
            self._connect, forget=self._mover.forget, hello_timeout_s=self._times.hello_s
        )

    def begin(self, key: int, words: DecodeWords, request: GenerateRequest) -> None:
        """Ask for a prompt's blocks; ``key`` names the hand-over until it is over and let go."""
        self._soon(lambda: self._begin(key, words, request))

    def aim(self, key: int, target: Target) -> None:
        """Read them into these blocks."""
        self._soon(lambda: self._aim(key, target))

    def drop(self, key: int) -> None:
        """It is not wanted any more. Nothing if it is over."""
        self._soon(lambda: self._drop(key))

    def poll(self) -> tuple[list[PullOver], list[int]]:
        """What is over, and the keys whose blocks nothing touches any more, since the last call."""
        with self._lock:
            over, self._over = self._over, []
            let_go, self._let_go = self._let_go, []
        return over, let_go

    def statistics(self) -> PullStatistics:
        with self._lock:
            return evolve(self._counts, nixl_bytes=self._mover.nixl_bytes)

    def stop(self) -> None:
        """Give everything up; from any thread but the loop's."""
        if self._loop is not None:
            with suppress(RuntimeError, TimeoutError):
                asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(5.0)

    # What follows runs in the event loop.

    def _begin(self, key: int, words: DecodeWords, request: GenerateRequest) -> None:
        assert self._loop is not None
        assert self._sources is not None
        pull = Pull(words, request, self._own, self._sources, self._mover, self._times)
        running = self._running[key] = _Running(pull)
        running.task = self._loop.create_task(pull.run())
        running.task.add_done_callback(lambda task: self._ended(key, running, task))
        with self._lock:
            self._counts = evolve(self._counts, active=self._counts.active + 1)

    def _aim(self, key: int, target: Target) -> None:
        running = self._running.get(key)
        if running is None:
            self._report_let_go(key)  # it failed or was dropped before it could be aimed
            return
        running.target = target
        target.on_let_go = lambda: self._touched_no_more(key, running)
        running.pull.aim(target)

    def _drop(self, key: int) -> None:
        running = self._running.get(key)
        if running is not None and running.task is not None:
            running.dropped = True
            running.task.cancel()

    def _ended(self, key: int, running: _Running, task: asyncio.Task[None]) -> None:
        assert self._loop is not None
        pull = running.pull
        if self._running.get(key) is running:
            del self._running[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a hand-over failed in an unforeseen way", exc_info=error)
            pull.error = f"{type(error).__name__}: {error}"
        how = "dropped" if running.dropped else "succeeded" if pull.error is None else "failed"
        with self._lock:
            counts = self._counts
            self._counts = evolve(
                counts,
                active=counts.active - 1,
                pulled_bytes=counts.pulled_bytes + pull.size_bytes,
                pull_s=counts.pull_s + pull.read_s,
                **{how: getattr(counts, how) + 1},
            )
        release = self._loop.create_task(pull.release())
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)
        if not running.dropped:
            with self._lock:
                self._over.append(PullOver(key, pull.good_tokens, pull.error))
        if running.target is not None:
            self._touched_no_more(key, running)
        self._on_news()

    def _touched_no_more(self, key: int, running: _Running) -> None:
        """The target is free once the hand-over is over and nothing is under way to it."""
        over = running.task is not None and running.task.done()
        if over and running.target is not None and not running.target.under_way:
            running.target = None
            self._report_let_go(key)

    def _report_let_go(self, key: int) -> None:
        with self._lock:
            self._let_go.append(key)
        self._on_news()

    async def _stop(self) -> None:
        for running in list(self._running.values()):
            if running.task is not None:
                running.dropped = True
                running.task.cancel()
        # The releases of what was cancelled just now begin with the loop's next turn.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if self._releases:
            await asyncio.wait(self._releases, timeout=1.0)
        if self._sources is not None:
            await self._sources.close()

    def _soon(self, call: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # It has ended.
                self._loop.call_soon_threadsafe(call)

"""The prefill side: answers the decode workers' questions, and ends leases. Thread-safe."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from attrs import frozen

from commutator.engine.handover.exports import Exports
from commutator.engine.handover.pull_words import ExportNews, ReadyBlock, Source, Watch
from commutator.engine.handover.statistics import ExportStatistics
from commutator.errors import EngineError

__all__ = ["ExportServer"]

ResultT = TypeVar("ResultT")

_EXPIRY_CHECK_S = 0.25
_LONGEST_WAIT_S = 60.0


@frozen
class _Release:
    id: str


class ExportServer:
    """Around the table of exports, for an engine of any kind.

    The engine's side (``begin`` to ``take_freed``) may be called from any thread; ``on_freed`` is
    called, from any thread, when ``take_freed`` has blocks to give back. ``hello`` says where the
    blocks lie, may wait, and is called on a thread of its own.
    """

    def __init__(self, hello: Callable[[], Source], on_freed: Callable[[], None]) -> None:
        self._hello = hello
        self._on_freed = on_freed
        self._lock = threading.Lock()
        self._exports = Exports()
        self._freed: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: dict[str, asyncio.Event] = {}
        self._watchers: dict[str, int] = {}
        self._expiring: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From the event loop in which questions are answered."""
        self._loop = asyncio.get_running_loop()
        self._expiring = self._loop.create_task(self._expire())

    def stop(self) -> None:
        """Answer nothing more; from any thread."""
        if self._loop is not None and self._expiring is not None:
            with suppress(RuntimeError):  # It has ended.
                self._loop.call_soon_threadsafe(self._expiring.cancel)

    def knows(self, export_id: str) -> bool:
        """Whether there is or was such a hand-over."""
        with self._lock:
            return self._exports.knows(export_id)

    def begin(self, export_id: str, lease_s: float) -> bool:
        """Whether anybody still wants it. Raises ValueError when it has begun already."""
        return self._changed(
            export_id, lambda: self._exports.begin(export_id, lease_s, time.monotonic())
        )

    def hold(self, export_id: str, blocks: Sequence[int]) -> bool:
        """The prompt's next blocks are computed and held. False: it is over, hold nothing."""
        with self._lock:
            return self._exports.hold(export_id, blocks)

    def publish(self, export_id: str, blocks: Sequence[ReadyBlock]) -> None:
        """The next of the held blocks can be read from now on."""
        self._changed(export_id, lambda: self._exports.publish(export_id, blocks))

    def complete(self, export_id: str) -> None:
        """No more blocks will come."""
        self._changed(export_id, lambda: self._exports.complete(export_id))

    def fail(self, export_id: str, reason: str) -> None:
        """Its prefill leg came to no good end."""
        self._end(export_id, lambda: self._exports.fail(export_id, reason))

    def fail_all(self, reason: str) -> None:
        """As ``fail``, for every hand-over; what they held is not given back by ``take_freed``."""
        with self._lock:
            self._exports.end_all(reason)
            self._freed.clear()
        self._soon(self._tell_all)

    def take_freed(self) -> list[int]:
        """Held blocks that are not needed any more, once for each time that they were held."""
        with self._lock:
            freed, self._freed = self._freed, []
        return freed

    def held(self) -> list[int]:
        """What is held, and what ``take_freed`` will give back."""
        with self._lock:
            return self._exports.held + self._freed

    def statistics(self) -> ExportStatistics:
        with self._lock:
            exports = self._exports
            return ExportStatistics(
                active=len(exports),
                held_blocks=len(exports.held),
                released=exports.ends["released"],
                failed=exports.ends["failed"],
                lapsed=exports.ends["lapsed"],
            )

    async def answer(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """The value for a question. Raises EngineError for one that makes no sense."""
        try:
            match what:
                case "hello":
                    return await asyncio.to_thread(self._hello)
                case "watch":
                    return await self._watch(msgspec.convert(arguments, Watch))
                case "release":
                    return self._release(msgspec.convert(arguments, _Release).id)
        except msgspec.ValidationError as error:
            raise EngineError(f"the arguments of {what!r} are wrong: {error}") from error
        raise EngineError(f"unknown question {what!r} about a hand-over")

    async def _watch(self, watch: Watch) -> ExportNews:
        event = self._news.setdefault(watch.id, asyncio.Event())
        self._watchers[watch.id] = self._watchers.get(watch.id, 0) + 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(watch.wait_s, _LONGEST_WAIT_S)):
                    while not _is_news(news := self._look(watch), watch):
                        event.clear()
                        await event.wait()
                    return news
            return self._look(watch)
        finally:
            self._watchers[watch.id] -= 1
            if not self._watchers[watch.id]:
                del self._watchers[watch.id], self._news[watch.id]

    def _look(self, watch: Watch) -> ExportNews:
        with self._lock:
            return self._exports.watch(watch.id, watch.have, time.monotonic())

    def _release(self, export_id: str) -> None:
        self._end(export_id, lambda: self._exports.release(export_id))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_CHECK_S)
            with self._lock:
                freed = self._exports.expire(time.monotonic())
                self._freed.extend(freed)
            if freed:
                self._on_freed()

    def _end(self, export_id: str, end: Callable[[], list[int]]) -> None:
        with self._lock:
            # In one go with the table: ``fail_all`` must find blocks in either, or in neither.
            freed = end()
            self._freed.extend(freed)
        self._soon(lambda: self._tell(export_id))
        if freed:
            self._on_freed()

    def _changed(self, export_id: str, change: Callable[[], ResultT]) -> ResultT:
        with self._lock:
            result = change()
        self._soon(lambda: self._tell(export_id))
        return result

    def _tell(self, export_id: str) -> None:
        if (event := self._news.get(export_id)) is not None:
            event.set()

    def _tell_all(self) -> None:
        for event in self._news.values():
            event.set()

    def _soon(self, call: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # It has ended, and so has everybody who asked.
                self._loop.call_soon_threadsafe(call)


def _is_news(news: ExportNews, watch: Watch) -> bool:
    return bool(news.blocks) or news.state is not watch.state

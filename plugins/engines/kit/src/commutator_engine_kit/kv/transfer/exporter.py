"""Lends blocks to other workers: holds them under leases, and answers readers' questions."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from attrs import define, field

from commutator.contract.worker import ExportStatistics
from commutator.errors import CommutatorError, EngineHandoverError
from commutator.frames import FrameProtocol, kind_of
from commutator.trust import Gate, Right, ServerGate, serve
from commutator_engine_kit.kv.transfer.protocol import (
    SERVICE,
    ExportedMemory,
    ExportState,
    ExportUpdate,
    LentBlocks,
    LookupRequest,
    ReadyBlock,
    ReleaseRequest,
    WatchRequest,
)

__all__ = ["BlockExporter", "LeaseTable"]

log = logging.getLogger(__name__)

_REMEMBERED = 4096
"""Ended leases that are remembered, so that late questions get the right answer."""


@define
class _Lease:
    lease_s: float
    ends_s: float
    held: Counter[int] = field(factory=Counter)
    """How many times each block is held, in order of first use."""
    total: int = 0
    """Blocks ever held."""
    ready: list[ReadyBlock] = field(factory=list)
    complete: bool = False


class LeaseTable:
    """The leases of one exporter.

    A lease begins, holds blocks, publishes those that can be read, and ends once: released, failed
    or lapsed, whichever comes first. The call that ends it returns the blocks that it held. If the
    reader releases a lease before it begins, it never holds a block.
    """

    def __init__(self, most_blocks: int = sys.maxsize) -> None:
        """``most_blocks`` bounds what ``lend`` holds for all readers together."""
        self._most_blocks = most_blocks
        self._held = 0
        self._leases: dict[str, _Lease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Ids of ended leases with the reason, oldest first."""
        self.ends: Counter[str] = Counter()
        """Number of ended leases by how: "released", "failed", "lapsed"."""

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def held(self) -> list[int]:
        """Every held block, once for each time that it is held."""
        return [block for lease in self._leases.values() for block in lease.held.elements()]

    @property
    def room(self) -> int:
        """The number of further blocks that may be lent now."""
        return self._most_blocks - self._held

    def begin(self, lease_id: str, lease_s: float, now_s: float) -> bool:
        """Begin a lease. False when it has already ended. Raises ValueError when it has begun."""
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id} has begun already")
        if lease_id in self._ended:
            return False
        self._leases[lease_id] = _Lease(lease_s, now_s + lease_s)
        return True

    def hold(self, lease_id: str, blocks: Sequence[int]) -> bool:
        """Hold the prompt's next blocks. False when the lease has ended: nothing is held."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.held.update(blocks)
        lease.total += len(blocks)
        self._held += len(blocks)
        return True

    def publish(self, lease_id: str, blocks: Sequence[ReadyBlock]) -> None:
        """Mark the next held blocks as readable. Does nothing when the lease has ended."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.ready.extend(blocks)

    def complete(self, lease_id: str) -> None:
        """Declare that no more blocks will be held. Does nothing when the lease has ended."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.complete = True

    def lend(
        self, lease_id: str, blocks: Sequence[ReadyBlock], lease_s: float, now_s: float
    ) -> bool:
        """Begin and complete a lease, for a look-up. False, with nothing held, if already released.

        Raises ValueError when there is no ``room`` for the blocks, or the lease has begun already.
        """
        if len(blocks) > self.room:
            raise ValueError(f"{len(blocks)} blocks cannot be lent, with room for {self.room}")
        if not self.begin(lease_id, lease_s, now_s):
            return False
        self.hold(lease_id, [block.index for block in blocks])
        self.publish(lease_id, blocks)
        self.complete(lease_id)
        return True

    def watch(self, lease_id: str, have: int, now_s: float) -> ExportUpdate:
        """The readable blocks after the first ``have``; renews the lease."""
        lease = self._leases.get(lease_id)
        if lease is None:
            reason = self._ended.get(lease_id)
            if reason is None:
                return ExportUpdate(ExportState.UNKNOWN)
            return ExportUpdate(ExportState.FAILED, reason=reason)
        lease.ends_s = max(lease.ends_s, now_s + lease.lease_s)
        done = lease.complete and len(lease.ready) == lease.total
        state = ExportState.COMPLETE if done else ExportState.RUNNING
        return ExportUpdate(state, tuple(lease.ready[max(0, have) :]))

    def release(self, lease_id: str, blocks: Iterable[int] | None = None) -> list[int]:
        """Release these blocks, or the whole lease, for its reader.

        Returns the blocks that the lease held. It ends with its last block.
        """
        lease = self._leases.get(lease_id)
        if blocks is None or lease is None:
            return self._end(lease_id, "released", "the reader had released it")
        released = [block for block in dict.fromkeys(blocks) if block in lease.held]
        for block in released:
            lease.held[block] -= 1
            if not lease.held[block]:
                del lease.held[block]
        self._held -= len(released)
        if not lease.held:
            self._end(lease_id, "released", "the reader had released it")
        return released

    def fail(self, lease_id: str, reason: str) -> list[int]:
        """End the lease: its prefill was aborted, or failed."""
        return self._end(lease_id, "failed", reason)

    def expire(self, now_s: float) -> list[int]:
        """End the leases that have lapsed."""
        lapsed = [
            (each, lease.lease_s) for each, lease in self._leases.items() if lease.ends_s <= now_s
        ]
        freed: list[int] = []
        for lease_id, lease_s in lapsed:
            freed += self._end(lease_id, "lapsed", f"its reader asked nothing for {lease_s:g} s")
        return freed

    def end_all(self, reason: str) -> list[int]:
        """Call ``fail`` for every lease."""
        return [block for lease_id in list(self._leases) for block in self.fail(lease_id, reason)]

    def _end(self, lease_id: str, how: str, reason: str) -> list[int]:
        lease = self._leases.pop(lease_id, None)
        if lease_id not in self._ended:
            self._ended[lease_id] = reason
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        if lease is None:
            return []
        self.ends[how] += 1
        held = list(lease.held.elements())
        self._held -= len(held)
        return held


ResultT = TypeVar("ResultT")
_EXPIRY_CHECK_S = 0.25
_LONGEST_WAIT_S = 60.0
_MOST_QUESTIONS = 8192
"""Questions of one reader that wait for an answer: one for each hand-over that it watches."""


class BlockExporter:
    """The leases of one arena or tier, and a server that answers readers' questions about them.

    The lender may call ``begin`` to ``statistics``, most of them as of ``LeaseTable``, from any
    thread. Readers are processes of the
    same run; all others are refused, unless this process is of none. UCX, which moves the bytes,
    checks nobody: it must listen only where workers are.
    """

    def __init__(
        self,
        on_freed: Callable[[], object],
        *,
        memory: Callable[[], ExportedMemory] | None = None,
        look_up: Callable[[LookupRequest], Awaitable[LentBlocks]] | None = None,
        most_blocks: int = sys.maxsize,
    ) -> None:
        """``on_freed`` is called, from any thread, when ``take_freed`` has new blocks.

        ``memory`` answers "hello" for an arena; it may wait, and is called on a thread of its own.
        ``look_up`` answers "look_up" for a tier, which lends at most ``most_blocks`` at a time.
        """
        self._gate: Gate = ServerGate(SERVICE, expects=Right.BORROW)
        self._on_freed = on_freed
        self._memory = memory
        self._look_up = look_up
        self._lock = threading.Lock()
        self._leases = LeaseTable(most_blocks)
        self._freed: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: dict[str, asyncio.Event] = {}
        self._watchers: dict[str, int] = {}
        self._readers: set[FrameProtocol] = set()
        self._running: list[asyncio.Task[Any]] = []

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen, and return the address; port 0 chooses a free port. Raises OSError.

        Call this in the event loop that is to answer the questions.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
        self._loop = asyncio.get_running_loop()
        self._running = [
            self._loop.create_task(self._serve(listening)),
            self._loop.create_task(self._expire()),
        ]
        return f"{host}:{listening.getsockname()[1]}"

    def stop(self) -> None:
        """Stop answering. Call this from any thread."""
        self._soon(lambda: [task.cancel() for task in self._running])

    def begin(self, lease_id: str, lease_s: float) -> bool:
        now_s = time.monotonic()
        return self._changed(lease_id, lambda: self._leases.begin(lease_id, lease_s, now_s))

    def hold(self, lease_id: str, blocks: Sequence[int]) -> bool:
        with self._lock:
            return self._leases.hold(lease_id, blocks)

    def publish(self, lease_id: str, blocks: Sequence[ReadyBlock]) -> None:
        self._changed(lease_id, lambda: self._leases.publish(lease_id, blocks))

    def complete(self, lease_id: str) -> None:
        self._changed(lease_id, lambda: self._leases.complete(lease_id))

    def room(self) -> int:
        with self._lock:
            return self._leases.room

    def lend(self, lease_id: str, blocks: Sequence[ReadyBlock], lease_s: float) -> bool:
        with self._lock:
            return self._leases.lend(lease_id, blocks, lease_s, time.monotonic())

    def fail(self, lease_id: str, reason: str) -> None:
        self._end(lease_id, lambda: self._leases.fail(lease_id, reason))

    def fail_all(self, reason: str) -> list[int]:
        """End every lease. Returns the blocks that were held, and those for ``take_freed``."""
        with self._lock:
            held = self._leases.end_all(reason) + self._freed
            self._freed = []
        self._soon(self._wake_all)
        return held

    def take_freed(self) -> list[int]:
        """Blocks that were released since the last call, once for each time they were held."""
        with self._lock:
            freed, self._freed = self._freed, []
        return freed

    def held(self) -> list[int]:
        """Blocks that are held, or that ``take_freed`` will return."""
        with self._lock:
            return self._leases.held + self._freed

    def statistics(self) -> ExportStatistics:
        with self._lock:
            leases = self._leases
            return ExportStatistics(
                active=len(leases),
                held_blocks=len(leases.held),
                released=leases.ends["released"],
                failed=leases.ends["failed"],
                lapsed=leases.ends["lapsed"],
            )

    async def answer(self, what: str, arguments: Any) -> Any:
        """Answer a question. Raises EngineHandoverError for one that is not valid."""
        try:
            if what == "watch":
                return await self._watch(msgspec.convert(arguments, WatchRequest))
            if what == "release":
                return self._release(msgspec.convert(arguments, ReleaseRequest))
            if what == "hello" and self._memory is not None:
                return await asyncio.to_thread(self._memory)
            if what == "look_up" and self._look_up is not None:
                return await self._look_up(msgspec.convert(arguments, LookupRequest))
        except msgspec.ValidationError as error:
            raise EngineHandoverError(f"the arguments of {what!r} are wrong: {error}") from error
        raise EngineHandoverError(f"this exporter does not answer {what[:80]!r}")

    async def _watch(self, watch: WatchRequest) -> ExportUpdate:
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

    def _look(self, watch: WatchRequest) -> ExportUpdate:
        with self._lock:
            return self._leases.watch(watch.id, watch.have, time.monotonic())

    def _release(self, request: ReleaseRequest) -> None:
        self._end(request.id, lambda: self._leases.release(request.id, request.blocks))

    async def _serve(self, listening: socket.socket) -> None:
        try:
            await serve(
                listening, lambda: _Reader(self.answer, self._readers, self._gate).frames, SERVICE
            )
        finally:
            for frames in self._readers.copy():
                frames.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_CHECK_S)
            with self._lock:
                freed = self._leases.expire(time.monotonic())
                self._freed.extend(freed)
            if freed:
                self._on_freed()

    def _end(self, lease_id: str, end: Callable[[], list[int]]) -> None:
        with self._lock:
            # Under one lock: ``fail_all`` must find each block in the table or among the freed.
            freed = end()
            self._freed.extend(freed)
        self._soon(lambda: self._wake(lease_id))
        if freed:
            self._on_freed()

    def _changed(self, lease_id: str, change: Callable[[], ResultT]) -> ResultT:
        with self._lock:
            result = change()
        self._soon(lambda: self._wake(lease_id))
        return result

    def _wake(self, lease_id: str) -> None:
        if (event := self._news.get(lease_id)) is not None:
            event.set()

    def _wake_all(self) -> None:
        for event in self._news.values():
            event.set()

    def _soon(self, call: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and with it all readers
                self._loop.call_soon_threadsafe(call)


class _Reader:
    """One reader's connection. Unanswered questions end with it."""

    def __init__(
        self,
        answer: Callable[[str, Any], Awaitable[Any]],
        connected: set[FrameProtocol],
        gate: Gate,
    ) -> None:
        self._answer_to = answer
        self._connected = connected
        self._answering: set[asyncio.Task[None]] = set()
        self.frames = FrameProtocol(self._on_frame, self._on_lost, gate)
        connected.add(self.frames)

    def _on_frame(self, frame: list[Any]) -> None:
        match frame:
            case ["ask", int(number), str(what), arguments]:
                if len(self._answering) >= _MOST_QUESTIONS:
                    log.warning(
                        "KV exporter: a reader has more than %d open questions; it is disconnected",
                        _MOST_QUESTIONS,
                    )
                    self.frames.close()
                    return
                task = asyncio.ensure_future(self._answer(number, what, arguments))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case _:
                log.warning("KV exporter: a reader sent an unknown frame: %s", kind_of(frame))
                self.frames.close()

    async def _answer(self, number: int, what: str, arguments: Any) -> None:
        try:
            self.frames.send(["answer", number, await self._answer_to(what, arguments)])
        except CommutatorError as error:
            self.frames.send(["failed", number, str(error)])
        except Exception as error:
            log.exception("KV exporter: the answer to %r failed", what)
            self.frames.send(["failed", number, f"{type(error).__name__}: {error}"])

    def _on_lost(self, reason: str) -> None:
        log.debug("KV exporter: a reader disconnected: %s", reason)
        self._connected.discard(self.frames)
        for task in self._answering:
            task.cancel()


def _is_news(news: ExportUpdate, watch: WatchRequest) -> bool:
    return bool(news.blocks) or news.state is not watch.state

"""Lends blocks to other workers: holds them under leases, and answers readers' questions."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

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


_EXPIRY_CHECK_S = 0.25
_LONGEST_WAIT_S = 60.0
_MOST_QUESTIONS = 8192
"""Questions of one reader that wait for an answer: one for each hand-over that it watches."""


class BlockExporter:
    """The leases of one arena or tier, and a server that answers readers' questions about them.

    A lease begins, holds blocks, publishes those that can be read, and ends once: released, failed
    or lapsed, whichever comes first. ``take_freed`` returns what it held. If the reader releases a
    lease before it begins, it never holds a block.

    The lender may call ``begin`` to ``statistics`` from any thread. Readers are processes of the
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_freed`` is called, from any thread, when ``take_freed`` has new blocks.

        ``memory`` answers "hello" for an arena; it may wait, and is called on a thread of its own.
        ``look_up`` answers "look_up" for a tier, which lends at most ``most_blocks`` at a time.
        """
        self._gate: Gate = ServerGate(SERVICE, expects=Right.BORROW)
        self._on_freed = on_freed
        self._memory = memory
        self._look_up = look_up
        self._most_blocks = most_blocks
        self._clock = clock
        self._lock = threading.Lock()
        self._held = 0
        self._leases: dict[str, _Lease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Ids of ended leases with the reason, oldest first."""
        self._ends: Counter[str] = Counter()
        """Number of ended leases by how: "released", "failed", "lapsed"."""
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
        """Begin a lease. False when it has already ended. Raises ValueError when it has begun."""
        with self._changing(lease_id):
            return self._begin(lease_id, lease_s) is not None

    def hold(self, lease_id: str, blocks: Sequence[int]) -> bool:
        """Hold the prompt's next blocks. False when the lease has ended: nothing is held."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is not None:
                self._hold(lease, blocks)
            return lease is not None

    def publish(self, lease_id: str, blocks: Sequence[ReadyBlock]) -> None:
        """Mark the next held blocks as readable. Does nothing when the lease has ended."""
        with self._changing(lease_id):
            if (lease := self._leases.get(lease_id)) is not None:
                lease.ready.extend(blocks)

    def complete(self, lease_id: str) -> None:
        """Declare that no more blocks will be held. Does nothing when the lease has ended."""
        with self._changing(lease_id):
            if (lease := self._leases.get(lease_id)) is not None:
                lease.complete = True

    def room(self) -> int:
        """The number of further blocks that may be lent now."""
        with self._lock:
            return self._most_blocks - self._held

    def lend(self, lease_id: str, blocks: Sequence[ReadyBlock], lease_s: float) -> bool:
        """Begin and complete a lease, for a look-up. False, with nothing held, if already released.

        Raises ValueError when there is no ``room`` for the blocks, or the lease has begun already.
        """
        with self._lock:
            if len(blocks) > (room := self._most_blocks - self._held):
                raise ValueError(f"{len(blocks)} blocks cannot be lent, with room for {room}")
            lease = self._begin(lease_id, lease_s)
            if lease is None:
                return False
            self._hold(lease, [block.index for block in blocks])
            lease.ready, lease.complete = list(blocks), True
            return True

    def fail(self, lease_id: str, reason: str) -> None:
        """End the lease: its prefill was aborted, or failed."""
        with self._changing(lease_id):
            freed = self._end(lease_id, "failed", reason)
        if freed:
            self._on_freed()

    def fail_all(self, reason: str) -> list[int]:
        """End every lease. Returns the blocks that were held, and those for ``take_freed``."""
        with self._lock:
            for lease_id in list(self._leases):
                self._end(lease_id, "failed", reason)
            held, self._freed = self._freed, []
        self._soon(self._wake_all)
        return held

    def take_freed(self) -> list[int]:
        """Blocks that were released since the last call, once for each time they were held."""
        with self._lock:
            freed, self._freed = self._freed, []
        return freed

    def held(self) -> list[int]:
        """Blocks that are held, once for each time, or that ``take_freed`` will return."""
        with self._lock:
            held = [block for lease in self._leases.values() for block in lease.held.elements()]
            return held + self._freed

    def statistics(self) -> ExportStatistics:
        with self._lock:
            return ExportStatistics(active=len(self._leases), held_blocks=self._held, **self._ends)

    def news(self, lease_id: str, have: int) -> ExportUpdate:
        """For the reader: the readable blocks after the first ``have``; renews the lease."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                reason = self._ended.get(lease_id)
                if reason is None:
                    return ExportUpdate(ExportState.UNKNOWN)
                return ExportUpdate(ExportState.FAILED, reason=reason)
            lease.ends_s = max(lease.ends_s, self._clock() + lease.lease_s)
            done = lease.complete and len(lease.ready) == lease.total
            state = ExportState.COMPLETE if done else ExportState.RUNNING
            return ExportUpdate(state, tuple(lease.ready[max(0, have) :]))

    def release(self, lease_id: str, blocks: Iterable[int] | None = None) -> None:
        """For the reader: release these blocks, or the whole lease. It ends with its last block."""
        with self._changing(lease_id):
            freed: list[int] = []
            lease = self._leases.get(lease_id)
            if blocks is not None and lease is not None:
                freed = [block for block in dict.fromkeys(blocks) if block in lease.held]
                for block in freed:
                    lease.held[block] -= 1
                    if not lease.held[block]:
                        del lease.held[block]
                self._free(freed)
            if blocks is None or lease is None or not lease.held:
                freed += self._end(lease_id, "released", "the reader had released it")
        if freed:
            self._on_freed()

    def expire(self) -> None:
        """End the leases that have lapsed."""
        with self._lock:
            now_s, freed = self._clock(), list[int]()
            for lease_id, lease in list(self._leases.items()):
                if lease.ends_s <= now_s:
                    reason = f"its reader asked nothing for {lease.lease_s:g} s"
                    freed += self._end(lease_id, "lapsed", reason)
        if freed:
            self._on_freed()

    # Under the lock

    def _begin(self, lease_id: str, lease_s: float) -> _Lease | None:
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id} has begun already")
        if lease_id in self._ended:
            return None
        lease = self._leases[lease_id] = _Lease(lease_s, self._clock() + lease_s)
        return lease

    def _hold(self, lease: _Lease, blocks: Sequence[int]) -> None:
        lease.held.update(blocks)
        lease.total += len(blocks)
        self._held += len(blocks)

    def _end(self, lease_id: str, how: str, reason: str) -> list[int]:
        """Returns the blocks that the lease held, which are free now."""
        lease = self._leases.pop(lease_id, None)
        if lease_id not in self._ended:
            self._ended[lease_id] = reason
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        if lease is None:
            return []
        self._ends[how] += 1
        held = list(lease.held.elements())
        self._free(held)
        return held

    def _free(self, blocks: Sequence[int]) -> None:
        self._held -= len(blocks)
        self._freed += blocks

    async def answer(self, what: str, arguments: Any) -> Any:
        """Answer a question. Raises EngineHandoverError for one that is not valid."""
        try:
            if what == "watch":
                return await self._watch(msgspec.convert(arguments, WatchRequest))
            if what == "release":
                request = msgspec.convert(arguments, ReleaseRequest)
                return self.release(request.id, request.blocks)
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
                    while not _is_news(news := self.news(watch.id, watch.have), watch):
                        event.clear()
                        await event.wait()
                    return news
            return self.news(watch.id, watch.have)
        finally:
            self._watchers[watch.id] -= 1
            if not self._watchers[watch.id]:
                del self._watchers[watch.id], self._news[watch.id]

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
            self.expire()

    @contextmanager
    def _changing(self, lease_id: str) -> Iterator[None]:
        """Holds the lock, then wakes those who watch the lease."""
        with self._lock:
            yield
        self._soon(lambda: self._wake(lease_id))

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

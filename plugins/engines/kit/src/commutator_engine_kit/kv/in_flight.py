"""Work in flight between an engine and its tiers: onboards, look-ups, and the next poll."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from attrs import define, field, frozen

from commutator.contract.block import BlockKey, KvEvent
from commutator.contract.tier import Span, StoredBlock
from commutator.errors import TierError
from commutator_engine_kit.kv.arena import Arena
from commutator_engine_kit.kv.block_manager.actions import JobUrgency, LoadResult
from commutator_engine_kit.kv.tiers.block_io import IoContext
from commutator_engine_kit.kv.tiers.executor import TierExecutor
from commutator_engine_kit.kv.tiers.thread import TierThread

__all__ = [
    "EventQueue",
    "FinishedOnboard",
    "Lookups",
    "Offload",
    "OnboardJobs",
    "OnboardTicket",
    "Polled",
    "settle",
    "uncancellable",
]

ResultT = TypeVar("ResultT")


def uncancellable() -> Future[Any]:
    """A future that cannot be cancelled, as tiers may touch its blocks until it is done."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def settle(future: Future[ResultT], result: ResultT | Exception) -> None:
    """Complete a future, unless it is done or cancelled."""
    with suppress(InvalidStateError):
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


@frozen(kw_only=True)
class OnboardTicket:
    """Blocks of a prompt that are worth onboarding.

    Tiers keep the blocks until ``KvConnector.onboard`` or ``cancel`` is called with the ticket. A
    ticket without blocks needs neither call.
    """

    id: str
    request_id: str
    """The id that ``KvConnector.plan`` was called with."""
    first: int
    """Index of the first block in the prompt."""
    media: tuple[str, ...] = ()
    """The medium of each block's tier, as named in KV events."""

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.media)


@frozen(kw_only=True)
class FinishedOnboard:
    """The result of an onboard."""

    ticket: OnboardTicket
    blocks: int
    """How many of its first blocks are on the device and verified. Compute the others."""


@define
class Polled:
    """Events since the last poll."""

    onboards: list[FinishedOnboard] = field(factory=list)
    """Some of an onboard's blocks may be released later, such as after a timeout."""
    released: list[int] = field(factory=list)
    """Device blocks that belong to the engine again, once for each time they were passed."""
    events: list[KvEvent] = field(factory=list)
    """The tiers' KV events, in order, to publish to routers."""


class EventQueue:
    """The connector's lock, and the result of the engine's next poll.

    ``wake`` and the calls passed to ``after`` run once the lock is released, on the thread that
    held it, because the engine may hold a lock of its own while it calls the connector.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.RLock()
        self._depth = 0
        self._news = False
        self._calls: list[Callable[[], object]] = []
        self._polled = Polled()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        wake, calls = False, None
        if not self._depth:
            wake, self._news = self._news, False
            if self._calls:
                calls, self._calls = self._calls, []
        self._lock.release()
        if calls is not None:
            for call in calls:
                call()
        if wake:
            self._wake()

    def after(self, call: Callable[[], object]) -> None:
        """Run ``call`` once the lock is released, then wake the engine."""
        with self:
            self._calls.append(call)
            self._news = True

    def report(
        self,
        *,
        onboards: Iterable[FinishedOnboard] = (),
        released: Iterable[int] = (),
        events: Iterable[KvEvent] = (),
    ) -> None:
        """Add to the result of the next poll, and wake the engine."""
        with self:
            self._polled.onboards += onboards
            self._polled.released += released
            self._polled.events += events
            self._news = True

    def take(self) -> Polled:
        """Events since the last call."""
        with self:
            polled, self._polled = self._polled, Polled()
            return polled


@define(eq=False)
class Offload:
    """Device blocks that the engine offloads in one call."""

    blocks: int
    """How many are not released yet."""
    future: Future[None] = field(factory=uncancellable)


@define(eq=False)
class _Part:
    """The blocks of an onboard that one tier reads, in one job."""

    tier: int
    positions: Sequence[int]
    """The blocks' positions in the onboard."""
    begun: bool = False
    given_up: bool = False
    """Its job does nothing; only before it began."""


@define(eq=False)
class _Onboard:
    """An onboard from its plan until its last block is released."""

    ticket: OnboardTicket
    blocks: tuple[tuple[BlockKey, int], ...]
    """The key and the tier of each block."""
    device_blocks: Sequence[int] = ()
    spans: Sequence[Span] = ()
    """The device blocks' memory."""
    unreleased: int = 0
    results: dict[BlockKey, LoadResult] = field(factory=dict)
    seconds: dict[int, float] = field(factory=dict)
    """The duration of each tier's job."""
    parts: list[_Part] = field(factory=list)
    """The parts that have not ended."""
    deadline_s: float = float("inf")
    """Parts that have not begun by this time are given up."""
    cancelled: bool = False
    good: int | None = None
    """How many of the first blocks were loaded; None until the last part has ended."""
    future: Future[list[bool]] = field(factory=uncancellable)


class OnboardJobs:
    """Splits each onboard into jobs of the tiers' threads, and joins their results.

    Call methods with the lock of ``queue`` held; jobs take it themselves. ``finish`` is called with
    a ticket's id, each block's result, and each tier's duration in seconds.
    """

    def __init__(
        self,
        threads: Sequence[TierThread],
        arena: Arena,
        queue: EventQueue,
        finish: Callable[[str, dict[BlockKey, LoadResult], dict[int, float]], None],
    ) -> None:
        self._threads = threads
        self._arena = arena
        self._queue = queue
        self._finish = finish
        self._onboards: dict[str, _Onboard] = {}

    def planned(self, ticket: OnboardTicket, blocks: tuple[tuple[BlockKey, int], ...]) -> None:
        """Remember an onboard for which the block manager has pinned these blocks."""
        self._onboards[ticket.id] = _Onboard(ticket, blocks)

    def start(
        self, ticket: OnboardTicket, device_blocks: Sequence[int], skip: int
    ) -> Future[list[bool]]:
        """Submit a job to each tier that has some of the blocks from number ``skip`` on.

        Raises ValueError when the ticket does not have these blocks, or when there are none;
        IndexError for a device block that is not in the arena.
        """
        onboard = self._onboards.get(ticket.id)
        if onboard is None or onboard.device_blocks:
            raise ValueError(f"onboard {ticket.id} was started or cancelled before")
        chosen = onboard.blocks[skip : skip + len(device_blocks)]
        if not chosen or len(chosen) != len(device_blocks):
            count = len(onboard.blocks)
            raise ValueError(f"{count} blocks were planned, not {skip} + {len(device_blocks)}")
        onboard.spans = [self._arena.span(block) for block in device_blocks]
        onboard.blocks = chosen
        onboard.device_blocks = tuple(device_blocks)
        onboard.unreleased = len(device_blocks)
        by_tier: dict[int, list[int]] = {}
        for position, (_, tier) in enumerate(chosen):
            by_tier.setdefault(tier, []).append(position)
        onboard.deadline_s = time.monotonic() + max(map(self._timeout_s, by_tier))
        onboard.parts = [_Part(tier, positions) for tier, positions in by_tier.items()]
        for part in list(onboard.parts):
            self._threads[part.tier].submit(JobUrgency.LOAD, partial(self._load, onboard, part))
        return onboard.future

    def cancel(self, ticket_id: str) -> None:
        """Cancel an onboard: end the parts that have not begun, and stop the others."""
        onboard = self._onboards.get(ticket_id)
        if onboard is None:
            return
        onboard.cancelled = True
        if onboard.device_blocks:
            self._give_up_waiting(onboard)
        else:
            del self._onboards[ticket_id]
            self._finish(ticket_id, {}, {})

    def cancel_all(self) -> None:
        """Cancel every onboard."""
        for ticket_id in list(self._onboards):
            self.cancel(ticket_id)

    def expire(self, now_s: float) -> None:
        """Give up parts that waited too long for their tier's thread: computing is faster now."""
        late = [one for one in self._onboards.values() if now_s > one.deadline_s]
        for onboard in late:
            onboard.deadline_s = float("inf")
            self._give_up_waiting(onboard)

    def fail(self, error: TierError) -> None:
        """Fail the futures of all onboards: no thread is left to end them."""
        for onboard in self._onboards.values():
            self._queue.after(partial(settle, onboard.future, error))

    def _timeout_s(self, tier: int) -> float:
        return self._threads[tier].worker.setup.config.load_timeout_s

    def _load(
        self, onboard: _Onboard, part: _Part, worker: TierExecutor | None
    ) -> Generator[None, None, None]:
        """The job of a part."""
        with self._queue:
            if part.given_up:
                return
            part.begun = True
        keys = [onboard.blocks[position][0] for position in part.positions]
        results, started_s = [LoadResult.FAILED] * len(keys), time.monotonic()

        def released(index: int) -> None:
            with self._queue:
                self._release(onboard, [part.positions[index]])

        try:
            if worker is None:
                for index in range(len(keys)):
                    released(index)
            else:
                results = worker.load(
                    keys,
                    [onboard.spans[position] for position in part.positions],
                    IoContext(started_s + self._timeout_s(part.tier), lambda: onboard.cancelled),
                    to_engine=True,
                    on_released=released,
                )
        finally:
            with self._queue:
                onboard.results.update(zip(keys, results, strict=True))
                onboard.seconds[part.tier] = time.monotonic() - started_s
                self._ended(onboard, part)
        yield from ()

    def _give_up_waiting(self, onboard: _Onboard) -> None:
        for part in [part for part in onboard.parts if not part.begun]:
            part.given_up = True
            self._release(onboard, part.positions)
            self._ended(onboard, part)

    def _ended(self, onboard: _Onboard, part: _Part) -> None:
        onboard.parts.remove(part)
        if onboard.parts:
            return
        results = (onboard.results.get(key) for key, _ in onboard.blocks)
        good = sum(1 for _ in takewhile(lambda result: result is LoadResult.LOADED, results))
        onboard.good = good
        self._queue.report(onboards=[FinishedOnboard(ticket=onboard.ticket, blocks=good)])
        self._finish(onboard.ticket.id, onboard.results, onboard.seconds)
        self._settle(onboard)

    def _release(self, onboard: _Onboard, positions: Sequence[int]) -> None:
        self._queue.report(released=[onboard.device_blocks[position] for position in positions])
        onboard.unreleased -= len(positions)
        self._settle(onboard)

    def _settle(self, onboard: _Onboard) -> None:
        """Complete the future once the result is known and every block is released."""
        if onboard.unreleased or onboard.good is None:
            return
        del self._onboards[onboard.ticket.id]
        loaded = [position < onboard.good for position in range(len(onboard.device_blocks))]
        self._queue.after(partial(settle, onboard.future, loaded))


_TIMEOUT_S = 1.0
"""Shared tiers that do not answer in this time count as empty."""


@define(eq=False)
class _Lookup:
    waiting: int
    """The number of tiers that have not answered."""
    deadline_s: float
    then: list[tuple[Future[Any], Callable[[], None]]] = field(factory=list)
    """Calls to make once all tiers have answered, each with the future that it completes."""


class Lookups:
    """Asks shared tiers for blocks that no tier is known to have, once for each request.

    Call methods with the lock of ``queue`` held. ``on_found`` is called with a tier's number and
    the blocks that it has.
    """

    def __init__(
        self,
        threads: Sequence[TierThread],
        queue: EventQueue,
        on_found: Callable[[int, Sequence[StoredBlock]], None],
    ) -> None:
        self._shared = {
            number: thread
            for number, thread in enumerate(threads)
            if thread.worker.setup.tier.shared
        }
        self._queue = queue
        self._on_found = on_found
        self._lookups: dict[str, _Lookup] = {}

    def __len__(self) -> int:
        """The number of requests that wait for answers, or whose answers are remembered."""
        return len(self._lookups)

    def ask(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        known: int,
        future: Future[Any],
        decide: Callable[[], None],
    ) -> None:
        """Call ``decide`` once all tiers have answered; at once if there is nothing to ask.

        ``known`` is how many of the first ``keys`` some tier is known to have.
        """
        now_s = time.monotonic()
        lookup = self._lookups.get(request_id)
        usable: list[tuple[int, TierThread]] = []
        if lookup is None and known < len(keys):
            usable = [(number, thread) for number, thread in self._shared.items() if thread.usable]
            if usable:
                lookup = self._lookups[request_id] = _Lookup(len(usable), now_s + _TIMEOUT_S)
        if lookup is None or not lookup.waiting or now_s >= lookup.deadline_s:
            decide()
            return
        lookup.then.append((future, decide))
        for number, thread in usable:
            thread.submit(JobUrgency.LOAD, partial(self._probe, number, lookup, keys))

    def forget(self, request_id: str) -> None:
        """Forget a request's answers, and cancel the futures that wait for them."""
        if (lookup := self._lookups.pop(request_id, None)) is not None:
            waiting, lookup.then = lookup.then, []
            for future, _ in waiting:
                self._queue.after(future.cancel)

    def forget_all(self) -> None:
        """Forget every request."""
        for request_id in list(self._lookups):
            self.forget(request_id)

    def expire(self, now_s: float) -> None:
        """Decide without the tiers that take too long to answer."""
        for lookup in list(self._lookups.values()):
            if lookup.then and now_s >= lookup.deadline_s:
                _decide(lookup)

    def _probe(
        self, tier: int, lookup: _Lookup, keys: Sequence[BlockKey], worker: TierExecutor | None
    ) -> Generator[None, None, None]:
        """The job of one tier."""
        found: Sequence[StoredBlock] = ()
        try:
            found = () if worker is None else worker.probe(keys)
        finally:
            with self._queue:
                lookup.waiting -= 1
                if found:
                    self._on_found(tier, found)
                if not lookup.waiting:
                    _decide(lookup)
        yield from ()


def _decide(lookup: _Lookup) -> None:
    waiting, lookup.then = lookup.then, []
    for _, decide in waiting:
        decide()

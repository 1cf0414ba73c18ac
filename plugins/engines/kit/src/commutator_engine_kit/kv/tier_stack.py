"""What an engine's look-ups, loads and stores share: its tiers, and the news for its next poll."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from attrs import define, field, frozen

from commutator.contract.block import KvEvent
from commutator.errors import TierError
from commutator_engine_kit.kv.arena import Arena
from commutator_engine_kit.kv.block_manager.manager import BlockManager
from commutator_engine_kit.kv.tiers.executor import TierThread

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

    Tiers keep the blocks until ``Loads.onboard`` or ``Loads.cancel`` is called with the ticket. A
    ticket without blocks needs neither call.
    """

    id: str
    request_id: str
    """The id that ``Lookups.plan`` was called with."""
    first: int
    """Index of the first block in the prompt."""
    media: tuple[str, ...] = ()
    """The medium of each block's tier, as named in KV events."""
    boundary: int = 0
    """Of a model with groups: where the prompt can be resumed once all blocks are loaded, or, of a
    ticket without blocks, with what the device has; in tokens."""
    shared: int = 0
    """Of a model with groups: how far those that need the whole prefix have it, in tokens. Where
    that is beyond the boundary, a window or a state was not kept."""
    places: tuple[tuple[int, int], ...] = ()
    """Of a model with groups: each block's group and number in the prompt, group by group."""

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.media)


@frozen(kw_only=True)
class FinishedOnboard:
    """The result of an onboard."""

    ticket: OnboardTicket
    blocks: int
    """How many of its first blocks are on the device and verified. Compute the others. Of a model
    with groups all of them, or none."""


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
class TierStack:
    """An engine's tiers, fastest first. The block manager is called with ``queue`` held."""

    arena: Arena
    """The engine's KV memory."""
    queue: EventQueue
    threads: Sequence[TierThread] = ()
    opened: BlockManager | None = None
    """None until the first attempt to open every tier has ended."""
    closed: bool = False

    @property
    def manager(self) -> BlockManager:
        """Decides which blocks are in which tier."""
        assert self.opened is not None, "start() comes first"
        return self.opened

    def must_be_open(self) -> None:
        """Raise TierError once the tiers are closed."""
        if self.closed:
            raise TierError("the tiers are closed")

"""What the service keeps of loads, and what it hands to the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from attrs import define, field, frozen

from commutator.kv.events import KvEvent
from commutator.kv.keys import BlockKey
from commutator.kv.load_result import LoadResult

__all__ = ["FinishedLoad", "Load", "LoadPart", "Outbox", "Polled"]


@frozen
class FinishedLoad:
    """A load that was started is over."""

    load_id: str
    blocks: int
    """So many of its first blocks are on the device and verified; the rest must be computed."""


@define
class Polled:
    """What happened since the last look."""

    loads: list[FinishedLoad] = field(factory=list)
    released: list[int] = field(factory=list)
    """Device blocks that are the engine's again, once for each time that they were handed over."""
    events: list[KvEvent] = field(factory=list)


@define
class LoadPart:
    """What one tier reads of a load, as one job."""

    tier: int
    positions: Sequence[int]
    """Of its blocks in the load."""
    begun: bool = False
    given_up: bool = False
    """Before it was begun: it will do nothing."""


@define
class Load:
    """A load from its plan to its last result."""

    blocks: tuple[tuple[BlockKey, int], ...]
    """Key and tier of each."""
    device_blocks: Sequence[int] = ()
    results: dict[BlockKey, LoadResult] = field(factory=dict)
    seconds: dict[int, float] = field(factory=dict)
    parts: list[LoadPart] = field(factory=list)
    """Those that are not over."""
    deadline_s: float = float("inf")
    """Parts that have not begun by then are given up."""
    cancelled: bool = False


class Outbox:
    """The service's lock, and what the engine finds with its next ``poll``.

    ``wake`` is called when the lock is let go of, never while it is held: the engine may hold a
    lock of its own while it calls the service.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.RLock()
        self._depth = 0
        self._news = False
        self._polled = Polled()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        wake = self._news and not self._depth
        if wake:
            self._news = False
        self._lock.release()
        if wake:
            self._wake()

    def released(self, device_blocks: Iterable[int]) -> None:
        """Nothing touches these blocks any more."""
        with self:
            self._polled.released += device_blocks
            self._news = True

    def finished(self, load: FinishedLoad) -> None:
        """A load is over."""
        with self:
            self._polled.loads.append(load)
            self._news = True

    def events(self, events: Iterable[KvEvent]) -> None:
        """Something for routers."""
        with self:
            self._polled.events += events
            self._news = True

    def poke(self) -> None:
        """Wake the engine although there is nothing to take: it may ask again."""
        with self:
            self._news = True

    def take(self) -> Polled:
        """What happened since the last call."""
        with self:
            polled, self._polled = self._polled, Polled()
            return polled

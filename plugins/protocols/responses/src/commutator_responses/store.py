"""Keeps responses, so that clients continue them by their ids; each is its principal's alone."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

from attrs import frozen

__all__ = ["MemoryStore", "ResponseStore", "Stored"]


@frozen(kw_only=True)
class Stored:
    """One response and what was new in its request."""

    id: str
    owner: str
    """The name of the principal that asked for it; others do not see it."""
    previous: str | None
    """The id of the response that it continues."""
    session: str | None
    """The session of its request, which those that continue it belong to as well."""
    input: bytes
    """JSON: the items of its request, without those of earlier ones."""
    response: bytes
    """JSON: the response."""

    @property
    def size_bytes(self) -> int:
        """What it counts in a store."""
        return len(self.input) + len(self.response)


class ResponseStore(ABC):
    """Where responses are kept. Used from one event loop.

    Its methods raise ``Failure`` with status 503 when they cannot do it now.
    """

    max_bytes: int
    """The most that all responses together take; one that is larger is not kept."""

    @abstractmethod
    async def put(self, stored: Stored) -> None:
        """Keep a response; others may be given up for it."""

    @abstractmethod
    async def history(self, owner: str, response_id: str, limit: int | None = None) -> list[Stored]:
        """The response and those that it continues, the earliest first.

        Ends, at its beginning, where one is no longer kept, or after ``limit``; empty where the
        response itself is not the owner's, or not kept. All of them count as used.
        """

    @abstractmethod
    async def delete(self, owner: str, response_id: str) -> bool:
        """Whether there was one to forget."""


@frozen
class _Held:
    stored: Stored
    used_s: float


class MemoryStore(ResponseStore):
    """In the process itself: lost with it, and unknown to others.

    When it is full, the principal that holds the most loses the responses that it used least
    recently.
    """

    def __init__(
        self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A response is forgotten ``ttl_s`` after it was last used."""
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()
        """Least recently used first."""
        self._owners: dict[str, OrderedDict[str, None]] = {}
        """The same order for each owner."""
        self._bytes: dict[str, int] = {}

    @property
    def size_bytes(self) -> int:
        """What it holds."""
        return sum(self._bytes.values())

    async def put(self, stored: Stored) -> None:
        self._expire()
        self._forget(stored.owner, stored.id)
        size = stored.size_bytes
        if size > self.max_bytes:
            return
        while self.size_bytes + size > self.max_bytes:
            owner = max(self._bytes, key=lambda name: self._bytes[name])
            self._forget(owner, next(iter(self._owners[owner])))
        self._held[stored.owner, stored.id] = _Held(stored, self._clock())
        self._owners.setdefault(stored.owner, OrderedDict())[stored.id] = None
        self._bytes[stored.owner] = self._bytes.get(stored.owner, 0) + size

    async def history(self, owner: str, response_id: str, limit: int | None = None) -> list[Stored]:
        self._expire()
        found: list[Stored] = []
        wanted: str | None = response_id
        while wanted is not None and (limit is None or len(found) < limit):
            held = self._held.get((owner, wanted))
            if held is None:
                break
            found.append(held.stored)
            wanted = held.stored.previous
        found.reverse()
        for one in found:
            self._use(one)
        return found

    async def delete(self, owner: str, response_id: str) -> bool:
        self._expire()
        return self._forget(owner, response_id)

    def _use(self, stored: Stored) -> None:
        key = stored.owner, stored.id
        self._held[key] = _Held(stored, self._clock())
        self._held.move_to_end(key)
        self._owners[stored.owner].move_to_end(stored.id)

    def _expire(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        while self._held:
            (owner, response_id), held = next(iter(self._held.items()))
            if held.used_s > oldest_s:
                return
            self._forget(owner, response_id)

    def _forget(self, owner: str, response_id: str) -> bool:
        held = self._held.pop((owner, response_id), None)
        if held is None:
            return False
        del self._owners[owner][response_id]
        self._bytes[owner] -= held.stored.size_bytes
        if not self._owners[owner]:
            del self._owners[owner], self._bytes[owner]
        return True

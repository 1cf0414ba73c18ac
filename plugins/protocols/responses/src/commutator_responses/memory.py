"""Keeps responses in the process itself: lost with it, and unknown to others."""

from __future__ import annotations

import time
from collections.abc import Callable

from commutator.contract.response_store import ResponseStore, StoredResponse
from commutator_responses.ledger import Key, Ledger


class MemoryStore(ResponseStore):
    """One event loop uses it, so nothing happens between two steps of a method."""

    def __init__(
        self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A response is forgotten ``ttl_s`` after it was last used."""
        self.max_bytes = max_bytes
        self._clock = clock
        self._ledger = Ledger(max_bytes, ttl_s)
        self._held: dict[Key, StoredResponse] = {}

    async def put(self, stored: StoredResponse) -> None:
        self._expire()
        self._put(stored)

    def _put(self, stored: StoredResponse) -> None:
        key, size = (stored.owner, stored.id), stored.size_bytes
        self._forget(key)
        if size > self.max_bytes:
            return
        for victim in self._ledger.room_for(size):
            del self._held[victim]
        self._held[key] = stored
        self._ledger.put(key, size, self._clock())

    async def replace(self, stored: StoredResponse, maker: str) -> bool:
        self._expire()
        held = self._held.get((stored.owner, stored.id))
        if held is None or held.maker != maker:
            return False
        self._put(stored)
        return True

    async def history(
        self, owner: str, response_id: str, limit: int | None = None
    ) -> list[StoredResponse]:
        self._expire()
        found: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None and (limit is None or len(found) < limit):
            held = self._held.get((owner, wanted))
            if held is None:
                break
            found.append(held)
            wanted = held.previous
        found.reverse()
        for one in found:
            self._ledger.use((owner, one.id), self._clock())
        return found

    async def delete(self, owner: str, response_id: str) -> bool:
        self._expire()
        return self._forget((owner, response_id))

    def _expire(self) -> None:
        for key in self._ledger.expired(self._clock()):
            del self._held[key]

    def _forget(self, key: Key) -> bool:
        self._ledger.forget(key)
        return self._held.pop(key, None) is not None

"""What a response store holds: whose, how much, and in which order it was used. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from attrs import frozen

Key = tuple[str, str]
"""(owner, id) of a response."""


@frozen
class _Entry:
    size_bytes: int
    used_s: float


class Ledger:
    """Says what has to be given up: what is too old, and where room is needed, of whom.

    That is the principal that holds the most, and of its responses the least recently used.
    """

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._held: OrderedDict[Key, _Entry] = OrderedDict()
        """Least recently used first."""
        self._owners: dict[str, OrderedDict[str, None]] = {}
        """The same order for each owner."""
        self._bytes: dict[str, int] = {}

    @property
    def size_bytes(self) -> int:
        """What is held."""
        return sum(self._bytes.values())

    def put(self, key: Key, size_bytes: int, now_s: float) -> None:
        """It is held, and used now."""
        self.forget(key)
        owner, response_id = key
        self._held[key] = _Entry(size_bytes, now_s)
        self._owners.setdefault(owner, OrderedDict())[response_id] = None
        self._bytes[owner] = self._bytes.get(owner, 0) + size_bytes

    def use(self, key: Key, now_s: float) -> None:
        """One that is held is used now."""
        if (entry := self._held.get(key)) is not None:
            self.put(key, entry.size_bytes, now_s)

    def forget(self, key: Key) -> bool:
        """Whether it was held."""
        entry = self._held.pop(key, None)
        if entry is None:
            return False
        owner, response_id = key
        del self._owners[owner][response_id]
        self._bytes[owner] -= entry.size_bytes
        if not self._owners[owner]:
            del self._owners[owner], self._bytes[owner]
        return True

    def expired(self, now_s: float) -> Iterator[Key]:
        """Those that were not used for long; each is forgotten."""
        while self._held:
            key, entry = next(iter(self._held.items()))
            if entry.used_s > now_s - self._ttl_s:
                return
            self.forget(key)
            yield key

    def room_for(self, size_bytes: int) -> Iterator[Key]:
        """Those that give way to ``size_bytes``, at most ``max_bytes``; each is forgotten."""
        while self._held and self.size_bytes + size_bytes > self.max_bytes:
            owner = max(self._bytes, key=lambda name: self._bytes[name])
            key = owner, next(iter(self._owners[owner]))
            self.forget(key)
            yield key

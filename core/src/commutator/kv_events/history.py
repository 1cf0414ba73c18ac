"""The last messages of a stream, for those who missed some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

__all__ = ["RELAYED_BYTES", "RELAYED_MESSAGES", "MessageHistory"]

RELAYED_MESSAGES = 10_000
"""Messages of a stream that its worker's host passes on, and keeps for replays."""
RELAYED_BYTES = 64 * 1024 * 1024
"""The most that they take up."""


class MessageHistory:
    """Keeps at most ``most`` messages, and at most ``most_bytes`` bytes of them. Pure."""

    def __init__(self, most: int, most_bytes: int | None = None) -> None:
        self._bodies: deque[bytes] = deque(maxlen=most)
        self._most_bytes = most_bytes
        self._bytes = 0
        self.end = 0
        """The sequence of the next message."""

    def append(self, body: bytes) -> int:
        """Keep a message; returns its sequence."""
        self.end += 1
        bodies = self._bodies
        if self._most_bytes is None:
            bodies.append(body)
            return self.end - 1
        if len(bodies) == bodies.maxlen:
            self._bytes -= len(bodies.popleft())
        bodies.append(body)
        self._bytes += len(body)
        while self._bytes > self._most_bytes:
            self._bytes -= len(bodies.popleft())
        return self.end - 1

    @property
    def begin(self) -> int:
        """The sequence of the oldest message that is kept; ``end`` when there is none."""
        return self.end - len(self._bodies)

    def __getitem__(self, sequence: int) -> bytes:
        return self._bodies[sequence - self.begin]

    def since(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Every kept message from ``first`` on; valid until the next ``append``."""
        begin = max(first, self.begin)
        return enumerate(islice(self._bodies, begin - self.begin, None), begin)

"""Takes keys off the front of queues for a while, and puts them back in place."""

from __future__ import annotations

from collections import OrderedDict
from typing import Self

from commutator import BlockKey

Queue = OrderedDict[BlockKey, int]


class Aside:
    """While it is open, the front of a queue is the first key that was not examined."""

    def __init__(self) -> None:
        self._taken: list[tuple[Queue, BlockKey, int]] = []

    def put(self, queue: Queue, key: BlockKey, value: int) -> None:
        """Record a key that was popped from the front of ``queue``."""
        self._taken.append((queue, key, value))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for queue, key, value in reversed(self._taken):
            queue[key] = value
            queue.move_to_end(key, last=False)

"""Takes keys off the front of a queue for a while, and puts them back where they were."""

from __future__ import annotations

from collections import OrderedDict
from typing import Self

from commutator.kv import BlockKey

__all__ = ["Aside", "Queue"]

Queue = OrderedDict[BlockKey, int]


class Aside:
    """While it is open, a queue's front is what was not looked at yet."""

    def __init__(self) -> None:
        self._taken: list[tuple[Queue, BlockKey, int]] = []

    def put(self, queue: Queue, key: BlockKey, value: int) -> None:
        """Remember what was just popped from the front of ``queue``."""
        self._taken.append((queue, key, value))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for queue, key, value in reversed(self._taken):
            queue[key] = value
            queue.move_to_end(key, last=False)

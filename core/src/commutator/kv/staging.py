"""Scratch memory for blocks on their way: frames with headers, and what a GPU cannot reach."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from commutator.kv.arena import BlockArena
from commutator.transfer.spans import Memory

__all__ = ["PAGE_BYTES", "Staging"]

PAGE_BYTES = 4096


class Staging:
    """A fixed number of slots of DRAM, lent to whoever moves blocks.

    May be used from any thread, and never waits: whoever would wait might be the one that has to
    give back. A slot that NIXL may still write to is not given back.
    """

    def __init__(self, slot_bytes: int, count: int) -> None:
        self._memory = mmap.mmap(-1, slot_bytes * count)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.arena = BlockArena(
            memory=Memory.DRAM, address=address, block_bytes=slot_bytes, count=count
        )
        self._free = list(range(count))
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, wanted: int) -> Iterator[list[int]]:
        """Up to ``wanted`` slots, as many as are free: none, perhaps.

        The borrower removes from the list what must not be given back yet.
        """
        taken = self.take(wanted)
        try:
            yield taken
        finally:
            self.give_back(taken)

    def take(self, wanted: int) -> list[int]:
        """Up to ``wanted`` slots, as many as are free, to be given back."""
        with self._lock:
            taken = self._free[:wanted]
            del self._free[:wanted]
        return taken

    def take_later(self, call: Callable[[], None]) -> None:
        """Call once as soon as a slot is free: now, or on the thread that gives one back."""
        with self._lock:
            if not self._free:
                self._waiting.append(call)
                return
        call()

    def give_back(self, slots: Iterable[int]) -> None:
        """Nobody touches these slots any more."""
        with self._lock:
            self._free.extend(slots)
            waiting, self._waiting = (self._waiting, []) if self._free else ([], self._waiting)
        for call in waiting:
            call()

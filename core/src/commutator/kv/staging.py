"""Scratch memory for blocks on their way: frames with headers, and what a GPU cannot reach."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from commutator.kv.arena import BlockArena
from commutator.transfer.spans import Memory

__all__ = ["PAGE_BYTES", "Staging"]

PAGE_BYTES = 4096


class Staging:
    """A fixed number of slots of DRAM, lent to whoever moves blocks.

    May be used from any thread. A slot that NIXL may still write to is not given back.
    """

    def __init__(self, slot_bytes: int, count: int) -> None:
        self._memory = mmap.mmap(-1, slot_bytes * count)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.arena = BlockArena(
            memory=Memory.DRAM, address=address, block_bytes=slot_bytes, count=count
        )
        self._free = list(range(count))
        self._changed = threading.Condition()

    @contextmanager
    def lend(self, wanted: int) -> Iterator[list[int]]:
        """Between one and ``wanted`` slots; waits until there is one.

        The borrower removes from the list what must not be given back yet.
        """
        taken = self.take(wanted)
        try:
            yield taken
        finally:
            self.give_back(taken)

    def take(self, wanted: int) -> list[int]:
        """Between one and ``wanted`` slots, to be given back; waits until there is one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free))
            taken = self._free[:wanted]
            del self._free[:wanted]
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Nobody touches these slots any more."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

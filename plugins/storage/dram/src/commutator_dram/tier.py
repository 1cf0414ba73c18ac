"""The `dram` tier: contiguous slots in host memory. Blocks are lost when the process ends."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from attrs import frozen

from commutator import Memory, Region, Size, Slot, SlotGeometry, Span, TierConfig, setting
from commutator.errors import TierError
from commutator_dram.memory import HugePages, allocate
from commutator_engine_kit.kv import BlockArena, OpenedSlots, SlotTier

__all__ = ["DramConfig", "DramTier"]

_ALIGNMENT_BYTES = 4096
"""Alignment of each slot, so that direct I/O can read files into it."""


@frozen(kw_only=True)
class DramConfig(TierConfig):
    """Options of the `dram` tier."""

    memory = Memory.DRAM

    capacity: Size = setting(
        "Memory for blocks; allocated page by page, as blocks arrive, and for an engine on a GPU "
        "at once, as it is pinned."
    )
    huge_pages: HugePages = setting(
        "auto: use huge pages if available. required: refuse to start without them.", "auto"
    )


class DramTier(SlotTier):
    """One arena, registered as one region."""

    medium = "CPU"
    memory = Memory.DRAM
    backend = "UCX"

    def __init__(self, config: DramConfig) -> None:
        self._config = config
        self._memory: mmap.mmap | None = None
        self._arena: BlockArena | None = None

    @property
    def arena(self) -> BlockArena:
        """The memory of the slots. Raises TierError while the tier is not open."""
        if self._arena is None:
            raise TierError("dram: the tier is not open; call open() first")
        return self._arena

    def open_slots(self, geometry: SlotGeometry) -> OpenedSlots:
        slot_bytes = -(-geometry.slot_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        count = self._config.capacity // slot_bytes
        if not count:
            raise TierError(
                f"dram: a capacity of {self._config.capacity} bytes is less than one block; "
                f"set it to at least {slot_bytes}"
            )
        self._memory = allocate(count * slot_bytes, self._config.huge_pages)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._arena = BlockArena(
            memory=Memory.DRAM, address=address, block_bytes=slot_bytes, count=count
        )
        return OpenedSlots(count)

    def close_slots(self) -> None:
        self._arena = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def regions(self) -> Sequence[Region]:
        return [self.arena.region]

    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        return Span(self.arena.address_of(slot), size_bytes), None

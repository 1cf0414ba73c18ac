"""The `dram` tier: contiguous slots in host memory, in huge pages where there are any.

Blocks are lost when the process ends.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from attrs import frozen

from commutator import Memory, Region, Size, Slot, SlotGeometry, Span, TierConfig, setting
from commutator.errors import TierError
from commutator_engine_kit.kv import BlockArena, OpenedSlots, SlotTier

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


HugePages = Literal["auto", "off", "required"]

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_HUGETLB = 0x40000  # Linux; not every Python version exports it
_MEMINFO = Path("/proc/meminfo")
_TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def allocate(size_bytes: int, huge_pages: HugePages) -> mmap.mmap:
    """Allocate at least ``size_bytes``, page-aligned and zero; pages are taken at first access.

    Tries reserved huge pages first, then transparent ones. Raises TierError when there is too
    little memory, or when huge pages are required and neither kind is available.
    """
    if huge_pages != "off" and (memory := _reserved(size_bytes)) is not None:
        return memory
    try:
        memory = mmap.mmap(-1, size_bytes, flags=_PRIVATE)
    except (OSError, OverflowError) as error:
        raise TierError(
            f"dram: cannot allocate {size_bytes} bytes of memory ({error}); lower its capacity"
        ) from error
    if huge_pages != "off" and not _make_transparent(memory) and huge_pages == "required":
        memory.close()
        raise TierError(
            f"dram: no huge pages for {size_bytes} bytes; reserve them with `sysctl "
            f"vm.nr_hugepages=N`, write `madvise` into {_TRANSPARENT}, or set huge_pages: auto"
        )
    return memory


def _reserved(size_bytes: int) -> mmap.mmap | None:
    """Memory in huge pages that the administrator reserved; None when there are too few."""
    page_bytes = _reserved_page_bytes()
    if page_bytes is None:
        return None
    try:
        rounded_bytes = -(-size_bytes // page_bytes) * page_bytes
        return mmap.mmap(-1, rounded_bytes, flags=_PRIVATE | _MAP_HUGETLB)
    except (OSError, OverflowError):
        return None


def _reserved_page_bytes() -> int | None:
    try:
        found = re.search(r"^Hugepagesize: +(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _make_transparent(memory: mmap.mmap) -> bool:
    """Request transparent huge pages for ``memory``. Returns whether the kernel may use any."""
    try:
        if "[never]" in _TRANSPARENT.read_text():
            return False
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        return False
    return True

"""Allocates anonymous memory, with huge pages where available."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Literal

from commutator.errors import TierError

__all__ = ["HugePages", "allocate"]

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

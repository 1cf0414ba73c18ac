"""The preallocated files with the blocks' bytes, and the layout of slots in them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from commutator import Memory, Region, Slot, SlotGeometry, Span
from commutator.errors import TierError
from commutator_nvme.config import NvmeConfig
from commutator_nvme.files import Files, disk_errors

PAGE_BYTES = 4096
"""Direct I/O needs addresses, offsets and sizes that are multiples of the disk's sector."""

_NAME = "segment-"


def digest_of(identity: str) -> bytes:
    """``Layout.identity`` for ``SlotGeometry.identity``."""
    return sha256(identity.encode()).digest()


@frozen(kw_only=True)
class Layout:
    """The properties of a folder that are fixed while it has blocks, and its capacity."""

    identity: bytes
    """SHA-256 of the deployment's cache identity."""
    block_bytes: int
    block_tokens: int
    slot_bytes: int
    """Distance between slots; a multiple of a page."""
    segment_slots: int
    """Slots in one file; the last file may have fewer."""
    slots: int = field(eq=False)
    """The capacity, which may change at a restart."""

    @classmethod
    def of(cls, config: NvmeConfig, geometry: SlotGeometry) -> Layout:
        """The layout for a configuration. Raises TierError when not even one slot fits."""
        slot_bytes = -(-geometry.slot_bytes // PAGE_BYTES) * PAGE_BYTES
        layout = cls(
            identity=digest_of(geometry.identity),
            block_bytes=geometry.block_bytes,
            block_tokens=geometry.block_tokens,
            slot_bytes=slot_bytes,
            segment_slots=max(1, config.segment_size // slot_bytes),
            slots=config.capacity // slot_bytes,
        )
        if not layout.slots:
            raise TierError(
                f"nvme: a capacity of {config.capacity} bytes is less than one block; "
                f"set it to at least {slot_bytes}"
            )
        return layout

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return self.slots * self.slot_bytes

    def segment_of(self, slot: int) -> int:
        """The number of the file with the slot."""
        return slot // self.segment_slots

    def offset_of(self, slot: int) -> int:
        """The slot's offset in its file."""
        return slot % self.segment_slots * self.slot_bytes

    def segment_bytes(self) -> list[int]:
        """The size of each file."""
        full, rest = divmod(self.slots, self.segment_slots)
        return [self.segment_slots * self.slot_bytes] * full + [rest * self.slot_bytes] * bool(rest)

    def difference(self, other: Layout) -> str | None:
        """Why blocks of ``other`` cannot be used with this layout, as text; None if they can."""
        if other.identity != self.identity:
            return "belong to another model, tokenizer, dtype, parallel layout, codec or key"
        if other != self:
            return (
                f"have {other.block_bytes} bytes and {other.block_tokens} tokens in slots of "
                f"{other.slot_bytes} bytes and files of {other.segment_slots} slots, not "
                f"{self.block_bytes}, {self.block_tokens}, {self.slot_bytes} and "
                f"{self.segment_slots}"
            )
        return None


def check_room(folder: Path, layout: Layout) -> None:
    """Raise TierError when the disk is too small, before any change.

    Reads only the sizes of existing files: a mistaken capacity may mean millions of files.
    """
    full_bytes = layout.segment_slots * layout.slot_bytes
    present_bytes = 0
    with disk_errors(f"look at {folder}"):
        for number, size in _existing(folder):
            needed = min(full_bytes, layout.total_bytes - number * full_bytes)
            present_bytes += max(0, min(size, needed))
        room = os.statvfs(folder)
    missing_bytes, free_bytes = layout.total_bytes - present_bytes, room.f_bavail * room.f_frsize
    if missing_bytes > free_bytes:
        raise TierError(
            f"nvme: {folder} needs {missing_bytes} bytes more and has {free_bytes}; free some "
            "room, or lower capacity"
        )


def _existing(folder: Path) -> Iterator[tuple[int, int]]:
    """(number, bytes) of each segment in the folder. Raises OSError."""
    for path in folder.iterdir():
        digits = path.name.removeprefix(_NAME)
        if digits.isdecimal() and path.name == _file_name(int(digits)):
            yield int(digits), _size(path)


def _file_name(number: int) -> str:
    return f"{_NAME}{number:05}"


class Segments:
    """The segments of a folder: segment ``i`` has the slots from ``i * segment_slots`` on."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        """Read the sizes of existing files; ``allocate`` changes them."""
        self._layout = layout
        self._folder = folder
        self._sizes = layout.segment_bytes()
        self._paths = [folder / _file_name(number) for number in range(len(self._sizes))]
        with disk_errors(f"look at the files in {folder}"):
            self._found = [_size(path) for path in self._paths]
        self._descriptors: list[int] = []
        self._missing_bytes = sum(
            max(0, size - found) for size, found in zip(self._sizes, self._found, strict=True)
        )

    def discard(self) -> None:
        """Remove all files: their blocks, which no record names, are not left to be read."""
        with disk_errors(f"remove files in {self._folder}"):
            for path in self._folder.glob(f"{_NAME}*"):
                path.unlink()
        self._found = [0] * len(self._paths)
        self._missing_bytes = sum(self._sizes)

    def lost(self, slots: Iterable[Slot]) -> npt.NDArray[np.bool_]:
        """Which slots were in a file that was missing or too short."""
        layout = self._layout
        numbers = np.fromiter(slots, dtype=np.int64)
        ends = (numbers % layout.segment_slots + 1) * layout.slot_bytes
        found = np.array(self._found, dtype=np.int64)[numbers // layout.segment_slots]
        return ends > found

    def allocate(self, files: Files, *, direct: bool) -> None:
        """Give every file its size, and remove files that are not needed.

        When the disk is too small, raises TierError and removes the files it created.
        """
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        with disk_errors(f"allocate {self._missing_bytes} bytes in {self._folder}"):
            try:
                for path, size in zip(self._paths, self._sizes, strict=True):
                    descriptor = files.open(path, flags)
                    self._descriptors.append(descriptor)
                    os.posix_fallocate(descriptor, 0, size)
                    os.truncate(descriptor, size)
            except OSError:
                for path, found in zip(self._paths, self._found, strict=True):
                    if not found:
                        path.unlink(missing_ok=True)
                raise
        self._remove_others()

    def regions(self) -> list[Region]:
        return [
            Region(memory=Memory.FILE, span=Span(0, size, descriptor))
            for size, descriptor in zip(self._sizes, self._descriptors, strict=True)
        ]

    def place(self, slot: Slot, size_bytes: int) -> Span:
        descriptor = self._descriptors[self._layout.segment_of(slot)]
        return Span(self._layout.offset_of(slot), size_bytes, descriptor)

    def check(self, slots: Iterable[Slot], *, flush: bool) -> None:
        """Check that the slots' files exist, before a commit; ``flush`` writes them to the disk.

        Raises TierError. A removed file works until the process ends, but its blocks are lost then.
        """
        for number in sorted({self._layout.segment_of(slot) for slot in slots}):
            descriptor, path = self._descriptors[number], self._paths[number]
            with disk_errors(f"flush {path}"):
                if not os.fstat(descriptor).st_nlink:
                    raise TierError(f"nvme: {path} was removed; close and open the tier again")
                if flush:
                    os.fdatasync(descriptor)

    def _remove_others(self) -> None:
        with disk_errors(f"remove files in {self._folder} that are no longer needed"):
            for path in set(self._folder.glob(f"{_NAME}*")) - set(self._paths):
                path.unlink()


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0

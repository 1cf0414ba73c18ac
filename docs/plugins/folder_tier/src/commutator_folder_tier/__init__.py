"""A storage tier: a folder with one file for each KV block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from attrs import frozen

from commutator import (
    KEY_BYTES,
    Memory,
    Region,
    Size,
    Slot,
    SlotGeometry,
    Span,
    StoredBlock,
    TierConfig,
    TierRegister,
    hookimpl,
    setting,
)
from commutator.errors import TierError
from commutator_engine_kit.kv import OpenedSlots, SlotTier


@frozen(kw_only=True)
class FolderConfig(TierConfig):
    """Options of the tier; they stand in the YAML file beside `kind`."""

    memory = Memory.FILE
    path: str = setting("The folder; made when it is missing.")
    capacity: Size = setting("Most bytes of blocks.")


class FolderTier(SlotTier):
    """A file's name says which block is valid; core checks its bytes by the header in it."""

    medium = "DISK"
    memory = Memory.FILE
    backend = "POSIX"
    framed = True  # each file begins with a header: the tier need not remember checksums

    def __init__(self, config: FolderConfig) -> None:
        self._config = config
        self._paths: dict[Slot, Path] = {}
        self._numbers = count(1 << 32)  # NIXL's names for files: none may be used twice

    def open_slots(self, geometry: SlotGeometry) -> OpenedSlots:
        capacity = geometry.slots_in(self._config.capacity)
        self._folder = Path(self._config.path, geometry.identity)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self._folder.glob("*.part"):
                unfinished.unlink()
            files = [file for file in self._folder.iterdir() if len(file.name) == 2 * KEY_BYTES]
            for surplus in files[capacity:]:
                surplus.unlink()
            self._paths = dict(enumerate(files[:capacity]))
            found = [
                StoredBlock(key=bytes.fromhex(file.name), slot=slot, size_bytes=file.stat().st_size)
                for slot, file in self._paths.items()
            ]
        except OSError as error:
            raise TierError(f"folder: {error}; choose a path that can be written") from error
        return OpenedSlots(capacity, found)

    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        span = Span(0, size_bytes, next(self._numbers))
        return span, Region(memory=Memory.FILE, span=span, name=f"rw,create:{self._path(slot)}")

    def remember(self, blocks: Sequence[StoredBlock]) -> None:
        for stored in blocks:
            self._rename(stored.slot, stored.key.hex(), stored.size_bytes)

    def forget(self, blocks: Sequence[StoredBlock]) -> None:
        for stored in blocks:  # not removed: a transfer may still read it
            self._rename(stored.slot, f"{stored.slot}.part", stored.size_bytes)

    def _path(self, slot: Slot) -> Path:
        return self._paths.get(slot, self._folder / f"{slot}.part")

    def _rename(self, slot: Slot, name: str, size_bytes: int) -> None:
        try:
            path = self._path(slot)
            with path.open("rb+") as file:
                file.truncate(size_bytes)  # an older block in this slot may have been longer
            self._paths[slot] = path.rename(self._folder / name)
        except OSError as error:
            raise TierError(f"folder: {error}; does another process remove files?") from error


@hookimpl
def tier_register(register: TierRegister) -> None:
    register("folder", FolderConfig, FolderTier)

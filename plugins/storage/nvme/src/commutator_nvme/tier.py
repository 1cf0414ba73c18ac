"""The `nvme` tier: slots in files on a local disk. Committed blocks survive a restart."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from commutator import Memory, Region, Slot, SlotGeometry, Span, StoredBlock
from commutator.errors import TierError
from commutator_engine_kit.kv import OpenedSlots, SlotTier
from commutator_nvme.config import NvmeConfig
from commutator_nvme.files import Files, lock_folder, make_folder
from commutator_nvme.index import Index
from commutator_nvme.probe import Access, find_access
from commutator_nvme.segments import PAGE_BYTES, Layout, Segments, check_room

log = logging.getLogger(__name__)


class NvmeTier(SlotTier):
    """A folder with preallocated segments, and an index that is written after the blocks."""

    medium = "NVME"
    memory = Memory.FILE

    def __init__(self, config: NvmeConfig) -> None:
        self._config = config
        self.backend = config.backend
        self._files: Files | None = None
        self._flush = config.durable == "power"

    @property
    def backend_parameters(self) -> Mapping[str, str]:
        return self._access.parameters

    @property
    def folder(self) -> Path:
        """The folder of the files; made when it is missing.

        Raises TierError when that fails, and when it is not this user's alone.
        """
        if "{worker}" in self._config.path:
            raise TierError(
                f"nvme: {{worker}} in {self._config.path} was not replaced by a worker's id; "
                "give a path without it"
            )
        try:
            folder = Path(self._config.path).expanduser()
        except RuntimeError as error:
            raise TierError(f"nvme: {self._config.path}: {error}; give another path") from error
        make_folder(folder)
        return folder

    @cached_property
    def _access(self) -> Access:
        return find_access(self.folder, self._config)

    def open_slots(self, geometry: SlotGeometry) -> OpenedSlots:
        layout, folder, files = Layout.of(self._config, geometry), self.folder, Files()
        try:
            lock_folder(files, folder)
            direct = self._use_direct(geometry)
            check_room(folder, layout)
            self._segments = Segments(folder, layout)
            self._index = Index(folder, layout, files, geometry.seals)
            self._index.open(self._config.on_mismatch, self._segments.discard)
            self._segments.allocate(files, direct=direct)
            recovered = self._index.recover(self._segments)
        except TierError:
            files.close()
            raise
        self._files = files
        self.alignment_bytes = PAGE_BYTES if direct else 1
        if recovered.damaged:
            log.warning("%s: %d blocks are lost or damaged", folder, recovered.damaged)
        return OpenedSlots(layout.slots, list(recovered.blocks.values()), recovered.damaged)

    def close_slots(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

    def regions(self) -> Sequence[Region]:
        return self._segments.regions()

    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        return self._segments.place(slot, size_bytes), None

    def remember(self, blocks: Sequence[StoredBlock]) -> None:
        self._segments.check((stored.slot for stored in blocks), flush=self._flush)
        self._index.write(blocks, flush=self._flush)

    def forget(self, blocks: Sequence[StoredBlock]) -> None:
        self._index.erase((stored.slot for stored in blocks), flush=self._flush)

    def _use_direct(self, geometry: SlotGeometry) -> bool:
        """With `auto`, only when a block is a whole number of pages."""
        whole_pages = geometry.slot_bytes % PAGE_BYTES == 0
        return self._access.direct and (self._config.direct == "on" or whole_pages)

"""The index of a folder: a header, a record for each slot, and the blocks' owners."""

from __future__ import annotations

import gc
import logging
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from attrs import evolve, frozen

from commutator import Slot, StoredBlock
from commutator.contract.tier import BlockSeal
from commutator.errors import TierError
from commutator_engine_kit.kv import checksum
from commutator_nvme.files import Files, disk_errors, flush_folder, write_at
from commutator_nvme.owners import Owner, Owners
from commutator_nvme.records import RecordFormat, Recovered
from commutator_nvme.segments import PAGE_BYTES, Layout, Segments, digest_of

log = logging.getLogger(__name__)

HEADER_BYTES = 2 * PAGE_BYTES
"""The first two pages of the index: two copies of its header."""

_MAGIC = b"CMTNVIDX"
_VERSION = 2
# magic | version | nonce | identity | bytes of a block | its tokens | of a slot | slots in a file
_FIELDS = struct.Struct("<8sI4xQ32sQQQQ")
_CHECKSUM = struct.Struct("<Q")

_CHUNK_SLOTS = 1 << 16


class Index:
    """The file `index`. A record is written after its block's bytes, never before.

    ``seals``: as in ``SlotGeometry``.
    """

    def __init__(
        self, folder: Path, layout: Layout, files: Files, seals: Sequence[BlockSeal] = ()
    ) -> None:
        self._path = folder / "index"
        self._layout = layout
        self._files = files
        self._seals = seals
        self._sequence = 0

    def open(
        self, on_mismatch: Literal["refuse", "discard"], discard: Callable[[], object]
    ) -> None:
        """Open the folder's index, or start a new one. ``discard`` removes the blocks' bytes.

        Raises TierError when its blocks do not match the layout and ``on_mismatch`` is "refuse".
        """
        with disk_errors(f"read {self._path}"):
            try:
                self._descriptor = self._files.open(self._path)
            except FileNotFoundError:
                self._start_new()
                return
            header = parse_header(os.pread(self._descriptor, HEADER_BYTES, 0))
        if header is None:
            problem = (
                "cannot be read: both copies of the header of its index are damaged, or another "
                "version of Commutator wrote it"
            )
        else:
            problem = self._layout.difference(self._under_this_key(header.layout)) or ""
        if problem or header is None:
            if on_mismatch == "refuse":
                raise TierError(
                    f"nvme: the blocks in {self._path.parent} do not match this deployment: they "
                    f"{problem}. Choose another path, or set on_mismatch: discard; if only the key "
                    "is new, add the old one to read_keys"
                )
            discard()
            with disk_errors(f"write {self._path}"):
                self._start_new()
            return
        self._use(Header(nonce=header.nonce, layout=self._layout))

    def recover(self, segments: Segments) -> Recovered:
        """Return every committed block, and erase invalid records. Call ``open`` before."""
        recovered = Recovered()
        owners = self._owners.open(self._layout.slots)
        with disk_errors(f"read {self._path}"), _no_garbage_collection():
            for first in range(0, self._layout.slots, _CHUNK_SLOTS):
                count = min(_CHUNK_SLOTS, self._layout.slots - first)
                size_bytes = count * self._format.record_bytes
                data = os.pread(self._descriptor, size_bytes, self._offset(first))
                lost = segments.lost(range(first, first + count))
                self._format.recover(data, first, lost, owners, recovered)
        self._sequence = recovered.last_sequence
        self.erase(recovered.invalid)
        gone = set(recovered.invalid)
        self._owners.start({s: n for s, n in recovered.owners.items() if s not in gone})
        if recovered.under_older_keys:
            log.info(
                "%s: %d blocks are under keys in read_keys; those keys are needed until these "
                "blocks are evicted",
                self._path.parent,
                recovered.under_older_keys,
            )
        return recovered

    def write(self, blocks: Sequence[StoredBlock], *, flush: bool) -> None:
        """Make blocks valid, durably: all of them, or none when it raises TierError."""
        self._owners.prune()
        owners = [Owner.of(stored) for stored in blocks]
        numbers = {owner: self._owners.number(owner, flush=flush) for owner in owners}
        records = [
            self._format.pack(stored, self._sequence + 1, numbers[owner])
            for stored, owner in zip(blocks, owners, strict=True)
        ]
        self._sequence += 1
        self._check_present()
        try:
            with disk_errors(f"write {self._path}"):
                for stored, record in zip(blocks, records, strict=True):
                    write_at(self._descriptor, record, self._offset(stored.slot))
                if flush:
                    os.fdatasync(self._descriptor)
        except TierError:
            self.erase(stored.slot for stored in blocks)
            raise
        for stored, owner in zip(blocks, owners, strict=True):
            self._owners.assign(stored.slot, numbers[owner])

    def erase(self, slots: Iterable[Slot], *, flush: bool = False) -> None:
        """Make slots invalid, durably. Raises TierError."""
        nothing = bytes(self._format.record_bytes)
        slots = list(slots)
        with disk_errors(f"write {self._path}"):
            for slot in slots:
                write_at(self._descriptor, nothing, self._offset(slot))
            if flush:
                os.fdatasync(self._descriptor)
        self._owners.release(slots)

    def _start_new(self) -> None:
        """Replace the old index by a new one without blocks. Raises OSError."""
        header = Header(nonce=int.from_bytes(os.urandom(8), "little"), layout=self._layout)
        fresh = self._path.with_name("index.new")
        self._descriptor = self._files.create(fresh)
        try:
            self._use(header)
            os.fsync(self._descriptor)
        except (OSError, TierError):
            fresh.unlink()
            raise
        fresh.rename(self._path)
        flush_folder(self._path.parent)

    def _use(self, header: Header) -> None:
        """Size the file for the layout's slots, and repair the header's copies. Raises OSError."""
        layout = self._layout
        owners = self._path.with_name("owners")
        self._owners = Owners(owners, header.nonce, self._files, self._seals)
        self._format = RecordFormat(
            layout.block_tokens, layout.slot_bytes, header.nonce, self._seals
        )
        size_bytes = self._offset(layout.slots)
        with disk_errors(f"allocate {size_bytes} bytes for {self._path}"):
            if os.pread(self._descriptor, HEADER_BYTES, 0) != header.pack():
                write_at(self._descriptor, header.pack(), 0)
            os.posix_fallocate(self._descriptor, 0, size_bytes)
            os.truncate(self._descriptor, size_bytes)

    def _under_this_key(self, found: Layout) -> Layout:
        """The same layout, with the current key's identity if it has that of an older key."""
        known = {digest_of(seal.identity) for seal in self._seals}
        return evolve(found, identity=self._layout.identity) if found.identity in known else found

    def _offset(self, slot: Slot) -> int:
        return HEADER_BYTES + slot * self._format.record_bytes

    def _check_present(self) -> None:
        if not os.fstat(self._descriptor).st_nlink:
            raise TierError(f"nvme: {self._path} was removed; close and open the tier again")


@frozen(kw_only=True)
class Header:
    """An index's layout and random nonce, which makes records of other indexes invalid."""

    nonce: int
    layout: Layout

    def pack(self) -> bytes:
        """``HEADER_BYTES`` bytes."""
        layout = self.layout
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            self.nonce,
            layout.identity,
            layout.block_bytes,
            layout.block_tokens,
            layout.slot_bytes,
            layout.segment_slots,
        )
        page = fields + _CHECKSUM.pack(checksum(fields))
        return page.ljust(PAGE_BYTES, b"\0") * 2


def parse_header(data: bytes) -> Header | None:
    """Read the header from either copy; None when neither is intact and of this version."""
    for copy in (data[:PAGE_BYTES], data[PAGE_BYTES:HEADER_BYTES]):
        if len(copy) < PAGE_BYTES:
            return None
        fields = copy[: _FIELDS.size]
        (stored,) = _CHECKSUM.unpack_from(copy, _FIELDS.size)
        magic, version, nonce, identity, block_bytes, block_tokens, slot_bytes, segment_slots = (
            _FIELDS.unpack(fields)
        )
        if magic == _MAGIC and version == _VERSION and stored == checksum(fields):
            layout = Layout(
                identity=identity,
                block_bytes=block_bytes,
                block_tokens=block_tokens,
                slot_bytes=slot_bytes,
                segment_slots=segment_slots,
                slots=0,
            )
            return Header(nonce=nonce, layout=layout)
    return None


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """All objects made here stay alive: repeated garbage collection would only be slow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""The format of the index's records: one for each slot, with its block and a checksum.

Little-endian: checksum u64 | sequence u64 | payload checksum u64 | payload bytes u64 | key 32 |
parent 32 | tokens u32 | has a parent u32 | owner u32 (see ``owners``) | token ids u32 each | zeros
up to a multiple of 64. The checksum covers the rest and is seeded by the index and the slot: a
record is valid only in its own place. An empty slot's record is zeros. With a key a record is
sealed, for its place in this index, and then padded with zeros again. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash
from attrs import define, field

from commutator import KEY_BYTES, BlockKey, Slot, StoredBlock
from commutator.contract.tier import BlockSeal
from commutator_nvme.owners import Owner

_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_BYTES = 8
_FIXED = struct.Struct(f"<QQQ{KEY_BYTES}s{KEY_BYTES}sIII")
_ALIGNMENT_BYTES = 64
_PLACE = struct.Struct("<6sQQ")
_UINT64 = 1 << 64
_FEW_TOKEN_IDS = 1 << 20


@define
class Recovered:
    """The blocks and invalid slots that an index has."""

    blocks: dict[BlockKey, StoredBlock] = field(factory=dict)
    """Of several records for one key, the latest."""
    invalid: list[Slot] = field(factory=list)
    """Slots whose records must be erased: damaged, superseded, or of a lost block."""
    damaged: int = 0
    """How many of them are of a lost block."""
    last_sequence: int = 0
    owners: dict[Slot, int] = field(factory=dict)
    """The owner's number in each intact record, without number 0."""
    under_older_keys: int = 0
    """Intact records that are not sealed with the current key."""
    _sequences: dict[Slot, int] = field(factory=dict)

    def add(self, blocks: Sequence[StoredBlock], sequences: Sequence[int]) -> None:
        """Add intact records, with their sequence numbers."""
        self.last_sequence = max(self.last_sequence, max(sequences, default=0))
        self._sequences |= zip((stored.slot for stored in blocks), sequences, strict=True)
        fresh = {stored.key: stored for stored in blocks}
        if len(fresh) == len(blocks) and self.blocks.keys().isdisjoint(fresh):
            self.blocks |= fresh
            return
        for stored in blocks:
            other = self.blocks.setdefault(stored.key, stored)
            if other is not stored:
                older, newer = sorted((other, stored), key=lambda one: self._sequences[one.slot])
                self.blocks[stored.key] = newer
                self.invalid.append(older.slot)


class RecordFormat:
    """Packs and unpacks the records of one index.

    ``seals``: as in ``SlotGeometry``.
    """

    def __init__(
        self, block_tokens: int, slot_bytes: int, nonce: int, seals: Sequence[BlockSeal] = ()
    ) -> None:
        self._tokens = struct.Struct(f"<{block_tokens}I")
        self._block_tokens = block_tokens
        self._slot_bytes = slot_bytes
        self._nonce = nonce
        plain_bytes = _CHECKSUM_BYTES + _FIXED.size + self._tokens.size
        self._seals = seals
        self._plain_bytes = _aligned(plain_bytes)
        self._sealed_bytes = self._plain_bytes + (seals[0].overhead_bytes if seals else 0)
        self.record_bytes = _aligned(self._sealed_bytes)
        names = ["checksum", "sequence", "payload", "size", "key", "parent"]
        names += ["tokens", "has_parent", "owner"]
        formats = ["<u8"] * 4 + [f"V{KEY_BYTES}"] * 2 + ["<u4"] * 3
        sizes = [np.dtype(name).itemsize for name in formats]
        self._dtype = np.dtype(
            {
                "names": [*names, "token_ids"],
                "formats": [*formats, ("<u4", (block_tokens,))],
                "offsets": [*np.cumsum([0, *sizes]).tolist()],
                "itemsize": self._plain_bytes,
            }
        )

    def pack(self, stored: StoredBlock, sequence: int, owner: int) -> bytes:
        """Pack a committed block's record. Raises ValueError when it has too many tokens."""
        count = len(stored.token_ids)
        if count > self._block_tokens:
            raise ValueError(
                f"a block has {count} tokens; the geometry says at most {self._block_tokens}"
            )
        fixed = _FIXED.pack(
            sequence,
            stored.checksum,
            stored.size_bytes,
            stored.key,
            stored.parent or bytes(KEY_BYTES),
            count,
            stored.parent is not None,
            owner,
        )
        tokens = self._tokens.pack(*stored.token_ids, *[0] * (self._block_tokens - count))
        rest = (fixed + tokens).ljust(self._plain_bytes - _CHECKSUM_BYTES, b"\0")
        record = _CHECKSUM.pack(self._checksum(rest, stored.slot)) + rest
        if self._seals:
            record = self._seals[0].seal(record, self._place(stored.slot))
        return record.ljust(self.record_bytes, b"\0")

    def recover(
        self,
        data: bytes,
        first_slot: Slot,
        lost: npt.NDArray[np.bool_],
        owners: Mapping[int, Owner],
        into: Recovered,
    ) -> None:
        """Read the records of consecutive slots; ``lost`` marks slots whose bytes are missing."""
        count = len(data) // self.record_bytes
        raw = np.frombuffer(data, dtype=np.uint8).reshape(count, self.record_bytes)
        used = np.flatnonzero(raw.view(np.uint64).any(axis=1))
        slots = (used + first_slot).tolist()
        plain = self._opened(raw[used].tobytes(), slots, into)
        mine = np.frombuffer(plain, dtype=self._dtype)
        split = struct.Struct(f"<{_CHECKSUM_BYTES}x{self._plain_bytes - _CHECKSUM_BYTES}s")
        rests = (rest for (rest,) in split.iter_unpack(plain))
        found = np.fromiter(map(self._checksum, rests, slots), dtype=np.uint64, count=len(used))
        intact = (
            (found == mine["checksum"])
            & (mine["sequence"] > 0)
            & (mine["size"] <= self._slot_bytes)
            & (mine["tokens"] <= self._block_tokens)
            & np.isin(mine["owner"], list(owners))
            & ~lost[used]
        )
        into.damaged += int(len(used) - intact.sum())
        into.invalid += (used[~intact] + first_slot).tolist()
        slots = (used[intact] + first_slot).tolist()
        numbers = mine["owner"][intact].tolist()
        into.owners |= {slot: n for slot, n in zip(slots, numbers, strict=True) if n}
        into.add(*_blocks(mine[intact], slots, owners))

    def _opened(self, records: bytes, slots: Sequence[Slot], into: Recovered) -> bytes:
        """The records without their seals; zeros, which are not intact, where none fits."""
        if not self._seals:
            return records
        opened: list[bytes] = []
        nothing = bytes(self._plain_bytes)
        for number, slot in enumerate(slots):
            start = number * self.record_bytes
            sealed = records[start : start + self._sealed_bytes]
            rest = records[start + self._sealed_bytes : start + self.record_bytes]
            place = self._place(slot)
            plain = nothing
            for seal in () if any(rest) else self._seals:
                if (found := seal.unseal(sealed, place)) is not None:
                    plain = found
                    into.under_older_keys += seal is not self._seals[0]
                    break
            opened.append(plain)
        return b"".join(opened)

    def _place(self, slot: Slot) -> bytes:
        return _PLACE.pack(b"record", self._nonce, slot)

    def _checksum(self, rest: bytes, slot: Slot) -> int:
        seed = (self._nonce + slot) % _UINT64
        return int(xxhash.xxh3_64_intdigest(rest, seed))


def _blocks(
    records: npt.NDArray[np.void], slots: Sequence[Slot], owners: Mapping[int, Owner]
) -> tuple[list[StoredBlock], Sequence[int]]:
    has_parent = records["has_parent"].tolist()
    rows = zip(
        _pieces(records["key"].tobytes()),
        slots,
        records["size"].tolist(),
        records["payload"].tolist(),
        _pieces(records["parent"].tobytes()),
        has_parent,
        _token_tuples(records["token_ids"], records["tokens"]),
        map(owners.__getitem__, records["owner"].tolist()),
        strict=True,
    )
    blocks = [
        StoredBlock(
            key=key,
            slot=slot,
            size_bytes=size_bytes,
            checksum=checksum,
            parent=parent if has_parent else None,
            token_ids=token_ids,
            adapter=owner.adapter,
            tenant=owner.tenant,
        )
        for key, slot, size_bytes, checksum, parent, has_parent, token_ids, owner in rows
    ]
    return blocks, records["sequence"].tolist()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _pieces(data: bytes) -> list[bytes]:
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


def _token_tuples(
    token_ids: npt.NDArray[np.uint32], counts: npt.NDArray[np.uint32]
) -> list[tuple[int, ...]]:
    largest = int(token_ids.max(initial=0))
    if largest < _FEW_TOKEN_IDS:
        # Shared integers: a million blocks would otherwise hold one for each of their tokens.
        token_ids = np.arange(largest + 1).astype(object)[token_ids]
    tuples = list(map(tuple, token_ids.tolist()))
    for number in np.flatnonzero(counts != token_ids.shape[1]).tolist():
        tuples[number] = tuples[number][: counts[number]]
    return tuples

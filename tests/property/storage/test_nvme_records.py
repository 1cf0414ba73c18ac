"""Records of the disk tier's index: what was written comes back, and nothing else is believed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commutator.contract.tier import SlotGeometry, StoredBlock
from commutator_nvme.config import NvmeConfig
from commutator_nvme.index import HEADER_BYTES, Header, parse_header
from commutator_nvme.owners import Owner
from commutator_nvme.records import RecordFormat, Recovered
from commutator_nvme.segments import PAGE_BYTES, Layout

TOKENS = 3
SLOTS = 5
SLOT_BYTES = 1 << 20
FORMAT = RecordFormat(TOKENS, SLOT_BYTES, nonce=7)
OWNERS = [Owner(), Owner("an adapter"), Owner(None, "a tenant"), Owner("an adapter", "a tenant")]
NUMBERED = dict(enumerate(OWNERS))

keys = st.binary(min_size=32, max_size=32)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=TOKENS) | st.just([5] * TOKENS)
blocks = st.builds(
    StoredBlock,
    key=keys,
    slot=st.integers(0, SLOTS - 1),
    size_bytes=st.integers(0, SLOT_BYTES),
    checksum=st.integers(0, 2**64 - 1),
    parent=st.none() | keys,
    token_ids=tokens.map(tuple),
    adapter=st.sampled_from([None, "an adapter"]),
    tenant=st.sampled_from([None, "a tenant"]),
)
contents = st.lists(blocks, max_size=SLOTS, unique_by=lambda stored: stored.slot)


def written(stored: list[StoredBlock], sequences: list[int] | None = None) -> bytearray:
    data = bytearray(SLOTS * FORMAT.record_bytes)
    for number, one in enumerate(stored):
        sequence = sequences[number] if sequences else number + 1
        record = FORMAT.pack(one, sequence, OWNERS.index(Owner(one.adapter, one.tenant)))
        data[one.slot * FORMAT.record_bytes : (one.slot + 1) * FORMAT.record_bytes] = record
    return data


def recovered(
    data: bytearray,
    lost: set[int] | None = None,
    first_slot: int = 0,
    owners: dict[int, Owner] = NUMBERED,
) -> Recovered:
    result = Recovered()
    mask = np.array([slot in (lost or ()) for slot in range(SLOTS)])
    FORMAT.recover(bytes(data), first_slot, mask, owners, result)
    return result


@given(contents)
def test_what_was_written_comes_back(stored: list[StoredBlock]) -> None:
    """Of blocks with the same key, the one that was written last."""
    result = recovered(written(stored))
    latest = {one.key: one for one in stored}
    assert result.blocks == latest
    assert result.damaged == 0
    assert set(result.invalid) == {one.slot for one in stored if latest[one.key] != one}
    assert result.last_sequence == len(stored)


@given(st.permutations(range(1, SLOTS + 1)))
def test_the_order_in_the_file_does_not_matter(sequences: list[int]) -> None:
    same_key = [StoredBlock(key=b"k" * 32, slot=s, size_bytes=s, checksum=s) for s in range(SLOTS)]
    result = recovered(written(same_key, sequences))
    newest = same_key[sequences.index(SLOTS)]
    assert result.blocks == {newest.key: newest}
    assert len(result.invalid) == SLOTS - 1


@given(contents, st.sets(st.integers(0, SLOTS - 1)))
def test_records_of_lost_slots_are_not_believed(stored: list[StoredBlock], lost: set[int]) -> None:
    result = recovered(written(stored), lost)
    kept = [one for one in stored if one.slot not in lost]
    assert result.blocks == {one.key: one for one in kept}
    assert result.damaged == len(stored) - len(kept)


@given(contents)
def test_a_block_whose_owner_is_not_known_is_not_believed(stored: list[StoredBlock]) -> None:
    result = recovered(written(stored), owners={0: OWNERS[0], 2: OWNERS[2]})
    known = [one for one in stored if one.adapter is None]
    assert set(result.blocks) == {one.key for one in known}
    assert result.damaged == len(stored) - len(known)


@settings(max_examples=20)
@given(blocks, st.integers(0, 7))
def test_any_changed_bit_is_noticed(stored: StoredBlock, bit: int) -> None:
    start = stored.slot * FORMAT.record_bytes
    for position in range(start, start + FORMAT.record_bytes):
        data = written([stored])
        data[position] ^= 1 << bit
        result = recovered(data)
        assert result.blocks == {}
        assert (result.damaged, result.invalid) == (1, [stored.slot])


@given(blocks, st.binary(min_size=1, max_size=FORMAT.record_bytes))
def test_a_torn_record_is_noticed(stored: StoredBlock, old: bytes) -> None:
    """The first part is of the record, the rest still of what was there before."""
    data = written([stored])
    whole = bytes(data)
    end = (stored.slot + 1) * FORMAT.record_bytes
    data[end - len(old) : end] = old
    assert (recovered(data).blocks == {}) == (bytes(data) != whole)


@given(blocks)
def test_a_record_is_valid_in_its_own_place_only(stored: StoredBlock) -> None:
    data = written([stored])
    assert recovered(data, first_slot=1).blocks == {}
    other = Recovered()
    RecordFormat(TOKENS, SLOT_BYTES, nonce=8).recover(
        bytes(data), 0, np.zeros(SLOTS, dtype=np.bool_), NUMBERED, other
    )
    assert other.blocks == {}
    assert other.damaged == 1


@pytest.mark.parametrize("block_tokens", [0, 1, 16, 1000])
def test_any_number_of_tokens(block_tokens: int) -> None:
    form = RecordFormat(block_tokens, SLOT_BYTES, nonce=1)
    stored = StoredBlock(
        key=b"k" * 32, slot=0, size_bytes=1, checksum=1, token_ids=tuple(range(block_tokens))
    )
    result = Recovered()
    form.recover(form.pack(stored, 1, 0), 0, np.zeros(1, dtype=np.bool_), NUMBERED, result)
    assert result.blocks == {stored.key: stored}
    assert form.record_bytes % 64 == 0


LAYOUT = Layout.of(
    NvmeConfig(kind="nvme", path="-", capacity=1 << 30, segment_size=1 << 24),
    SlotGeometry(block_bytes=5000, slot_bytes=5000, block_tokens=16, identity="a"),
)


@pytest.mark.parametrize("copy", [0, PAGE_BYTES])
def test_one_damaged_copy_of_the_header_does_not_matter_and_two_do(copy: int) -> None:
    header = Header(nonce=99, layout=LAYOUT)
    whole = header.pack()
    assert len(whole) == HEADER_BYTES
    used = len(whole[:PAGE_BYTES].rstrip(b"\0"))
    for position in range(used):
        data = bytearray(whole)
        data[copy + position] ^= 1
        assert parse_header(bytes(data)) == header
        data[PAGE_BYTES - copy + position] ^= 1
        assert parse_header(bytes(data)) is None
    assert parse_header(b"") is None
    assert parse_header(bytes(HEADER_BYTES)) is None


@given(st.integers(1, 1 << 24), st.integers(1 << 20, 1 << 26), st.integers(1, 1 << 30))
def test_slots_fit_into_their_files(slot_bytes: int, segment_size: int, capacity: int) -> None:
    capacity += slot_bytes + PAGE_BYTES
    layout = Layout.of(
        NvmeConfig(kind="nvme", path="-", capacity=capacity, segment_size=segment_size),
        SlotGeometry(block_bytes=slot_bytes, slot_bytes=slot_bytes, identity="a"),
    )
    sizes = layout.segment_bytes()
    assert sum(sizes) <= capacity
    assert sum(sizes) // layout.slot_bytes == layout.slots
    for slot in {0, layout.slots // 2, layout.slots - 1}:
        number, offset = layout.segment_of(slot), layout.offset_of(slot)
        assert offset % PAGE_BYTES == 0
        assert offset + slot_bytes <= sizes[number]
        assert number * layout.segment_slots + offset // layout.slot_bytes == slot

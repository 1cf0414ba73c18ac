"""The disk tier remembers whose its blocks are, and believes nothing that is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

import commutator_nvme.owners
from commutator.contract.tier import SlotGeometry, StoredBlock
from commutator.errors import TierError
from commutator_nvme.config import NvmeConfig
from commutator_nvme.files import Files
from commutator_nvme.owners import Owner, Owners
from commutator_nvme.tier import NvmeTier

ALICE, BOB = Owner(None, "alice"), Owner("sql\nadapter", "b\udce4b")


def opened(folder: Path, nonce: int = 1) -> tuple[Owners, dict[int, Owner]]:
    """As if each known owner had a block, in the slot of its number."""
    owners = Owners(folder / "owners", nonce, Files())
    known = dict(owners.open(100))
    owners.start({number: number for number in known})
    return owners, known


def test_numbers_stay_from_one_life_to_the_next(tmp_path: Path) -> None:
    owners, known = opened(tmp_path)
    assert known == {0: Owner()}
    numbers = {owner: owners.number(owner, flush=True) for owner in (ALICE, BOB, Owner(), ALICE)}
    assert len(set(numbers.values())) == 3
    again, known = opened(tmp_path)
    assert known == {number: owner for owner, number in numbers.items()}
    assert again.number(BOB, flush=False) == numbers[BOB]
    assert again.number(Owner("new"), flush=False) not in numbers.values()


def test_what_no_record_names_is_dropped(tmp_path: Path) -> None:
    owners, _ = opened(tmp_path)
    first, second = owners.number(ALICE, flush=False), owners.number(BOB, flush=False)
    owners.start({7: second})
    _, known = opened(tmp_path)
    assert known == {0: Owner(), second: BOB}
    assert first != second


def test_lines_of_another_index_are_not_believed(tmp_path: Path) -> None:
    owners, _ = opened(tmp_path, nonce=1)
    owners.number(ALICE, flush=False)
    _, known = opened(tmp_path, nonce=2)
    assert known == {0: Owner()}


def test_any_changed_byte_costs_only_the_line_that_it_is_in(tmp_path: Path) -> None:
    owners, _ = opened(tmp_path)
    named = {owners.number(owner, flush=False): owner for owner in (ALICE, BOB)}
    path = tmp_path / "owners"
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[position] ^= 1 << bit
            path.write_bytes(data)
            known = Owners(path, 1, Files()).open(100)
            assert known.items() <= (named | {0: Owner()}).items()
            lost = 1 if position != whole.index(b"\n") else 2
            assert len(known) == 3 - lost


def test_a_torn_line_is_passed_over_and_written_again(tmp_path: Path) -> None:
    owners, _ = opened(tmp_path)
    owners.number(ALICE, flush=False)
    owners.number(BOB, flush=False)
    path = tmp_path / "owners"
    path.write_bytes(path.read_bytes()[:-5])
    again, known = opened(tmp_path)
    assert list(known.values()) == [Owner(), ALICE]
    number = again.number(BOB, flush=False)
    assert opened(tmp_path)[1][number] == BOB


def test_a_removed_file_is_noticed(tmp_path: Path) -> None:
    owners, _ = opened(tmp_path)
    (tmp_path / "owners").unlink()
    with pytest.raises(TierError, match="removed"):
        owners.number(ALICE, flush=False)


SLOTS = 16
BLOCK_BYTES = 4096


def open_tier(folder: Path) -> tuple[NvmeTier, list[StoredBlock]]:
    config = NvmeConfig(kind="nvme", path=str(folder), capacity=SLOTS * BLOCK_BYTES)
    tier = NvmeTier(config)
    found = tier.open(
        SlotGeometry(block_bytes=BLOCK_BYTES, slot_bytes=BLOCK_BYTES, block_tokens=4, identity="a")
    )
    return tier, list(found)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").glob("*")))


def store(tier: NvmeTier, number: int, tenant: str) -> None:
    """Commit a block of the tenant, in the place of the one that was stored ``SLOTS`` before."""
    tier.evict([(number - SLOTS).to_bytes(32, "big", signed=True)])
    key = number.to_bytes(32, "big", signed=True)
    (slot,) = tier.reserve([key])
    assert slot is not None
    tier.commit([StoredBlock(key=key, slot=slot, size_bytes=1, tenant=tenant)])


@pytest.mark.security
def test_fresh_salts_for_ever_do_not_make_the_file_grow(tmp_path: Path) -> None:
    tier, _ = open_tier(tmp_path)
    largest_bytes, before = 0, open_files()
    for number in range(3000):
        store(tier, number, f"a salt that is used once: {number}")
        largest_bytes = max(largest_bytes, (tmp_path / "owners").stat().st_size)
    line_bytes = 100
    assert largest_bytes < (2 * SLOTS + 64 + 1) * line_bytes
    tier.close()
    tier, found = open_tier(tmp_path)
    assert {stored.tenant for stored in found} == {
        f"a salt that is used once: {number}" for number in range(3000 - SLOTS, 3000)
    }
    assert len((tmp_path / "owners").read_bytes().splitlines()) == SLOTS
    assert open_files() < before + 20, "replaced files are closed"
    tier.close()


@pytest.mark.security
def test_a_salt_of_megabytes_takes_as_much_room_as_any_other(tmp_path: Path) -> None:
    tier, _ = open_tier(tmp_path)
    salts = [f"{number}" * (1 << 20) for number in range(5)] + ["é" * 129, "é" * 128]
    for number, salt in enumerate(salts):
        store(tier, number, salt)
    assert (tmp_path / "owners").stat().st_size < 8 * 1024
    tier.close()
    tier, found = open_tier(tmp_path)
    tenants = [stored.tenant for stored in sorted(found, key=lambda stored: stored.key)]
    assert len(set(tenants)) == 7, "tenants stay apart"
    assert [tenant == salt for tenant, salt in zip(tenants, salts, strict=True)] == [False] * 6 + [
        True
    ]
    tier.close()


@pytest.mark.parametrize(
    "text", [b"[1]", b'{"1": 2}', b'["1", null, null]', b"[0, null, null]", b"[" * 5000, b"1"]
)
def test_a_line_with_a_right_checksum_and_nonsense_is_ignored(tmp_path: Path, text: bytes) -> None:
    line = b"%016x" % xxhash.xxh3_64_intdigest(text, 1) + text + b"\n"
    path = tmp_path / "owners"
    path.touch(0o600)
    path.write_bytes(line)
    assert Owners(path, 1, Files()).open(100) == {0: Owner()}


def test_a_file_with_too_many_or_endless_lines_is_read_in_bounds(tmp_path: Path) -> None:
    path = tmp_path / "owners"
    path.touch(0o600)
    with path.open("wb") as file:
        file.truncate(8 << 30)
    assert Owners(path, 1, Files()).open(10) == {0: Owner()}


def test_numbers_are_counted_up_and_begin_again_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commutator_nvme.owners, "_LARGEST_NUMBER", 5)
    owners, _ = opened(tmp_path)
    assert [owners.number(Owner(tenant=str(n)), flush=False) for n in range(5)] == [1, 2, 3, 4, 5]
    for number in range(1, 6):
        owners.assign(number, number)
    owners.release([2, 4])
    owners.start({1: 1, 3: 3, 5: 5})
    assert [owners.number(Owner(tenant=str(n)), flush=False) for n in (8, 9)] == [2, 4]

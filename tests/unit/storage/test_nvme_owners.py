"""The disk tier remembers whose its blocks are, and believes nothing that is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from commutator.errors import TierError
from commutator_nvme.files import Files
from commutator_nvme.owners import Owner, Owners

ALICE, BOB = Owner(None, "alice"), Owner("sql\nadapter", "b\udce4b")


def opened(folder: Path, nonce: int = 1) -> tuple[Owners, dict[int, Owner]]:
    owners = Owners(folder / "owners", nonce, Files())
    known = dict(owners.open())
    owners.keep(known.keys())
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
    owners.keep({second})
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
            known = Owners(path, 1, Files()).open()
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

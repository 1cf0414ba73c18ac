"""Scratch memory is lent, never waited for, and comes back."""

from __future__ import annotations

import threading

import pytest

from commutator_engine_kit.kv.arena import bytes_at
from commutator_engine_kit.kv.tiers.block_io import Staging


def test_as_many_are_lent_as_are_free_and_all_come_back() -> None:
    staging = Staging(64, 3)
    with staging.lend(2) as some:
        assert len(some) == 2
        with staging.lend(5) as rest:
            assert sorted(some + rest) == [0, 1, 2]
            with staging.lend(1) as none:
                assert none == []
    assert sorted(staging.take(5)) == [0, 1, 2]


def test_what_is_still_in_use_is_kept() -> None:
    staging = Staging(64, 2)
    with staging.lend(2) as slots:
        kept = slots.pop()
    assert staging.take(2) == [1 - kept]
    staging.give_back([kept])
    assert staging.take(2) == [kept]


def test_slots_come_back_when_a_borrower_fails() -> None:
    staging = Staging(64, 2)
    with pytest.raises(ZeroDivisionError), staging.lend(2):
        1 / 0  # noqa: B018
    assert len(staging.take(2)) == 2


def test_a_callback_on_release_is_called_once() -> None:
    staging = Staging(64, 1)
    told: list[str] = []
    staging.take_later(lambda: told.append("at once"))
    assert told == ["at once"]
    taken = staging.take(1)
    staging.take_later(lambda: told.append("first"))
    staging.take_later(lambda: told.append("second"))
    assert told == ["at once"]
    staging.give_back([])
    assert told == ["at once"], "there is still none"
    staging.give_back(taken)
    assert told == ["at once", "first", "second"]
    staging.give_back(staging.take(1))
    assert len(told) == 3


def test_a_callback_on_release_may_take_at_once() -> None:
    staging = Staging(64, 1)
    taken = staging.take(1)
    got: list[int] = []
    staging.take_later(lambda: got.extend(staging.take(1)))
    thread = threading.Thread(target=staging.give_back, args=(taken,))
    thread.start()
    thread.join(5)
    assert got == taken


def test_slots_do_not_overlap() -> None:
    staging = Staging(64, 3)
    for slot in range(3):
        bytes_at(staging.arena.span(slot))[:] = bytes([slot]) * 64
    for slot in range(3):
        assert bytes(bytes_at(staging.arena.span(slot))) == bytes([slot]) * 64

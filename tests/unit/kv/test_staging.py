"""Scratch memory is lent, never waited for, and comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from commutator.contract.tier import Span, StoredBlock
from commutator_engine_kit.kv.arena import bytes_at
from commutator_engine_kit.kv.tiers.block_io import LoadBlock, StagedIo, Staging
from commutator_engine_kit.kv.tiers.mover import IoContext


class Mover:
    """Fails every move; a transfer into slot 1 may still touch memory until it is over."""

    def __init__(self) -> None:
        self.held: list[Callable[[], None]] = []

    def move(self, *_: object) -> list[None]:
        raise ZeroDivisionError

    def on_released(self, slot: int, call: Callable[[], None]) -> None:
        if slot == 1:
            self.held.append(call)
        else:
            call()


def test_as_many_are_lent_as_are_free() -> None:
    staging = Staging(64, 3)
    some, rest = staging.take(2), staging.take(5)
    assert sorted(some + rest) == [0, 1, 2]
    assert staging.take(1) == []
    staging.give_back(rest)
    assert staging.take(5) == rest


def test_slots_come_back_when_a_move_fails_but_not_while_it_may_write_to_them() -> None:
    staging, mover = Staging(4096, 3), Mover()
    io = StagedIo(cast("Any", mover), cast("Any", None), staging, framed=False)
    blocks = [
        LoadBlock(stored=StoredBlock(key=bytes(32), slot=slot, size_bytes=64), local=Span(0, 64))
        for slot in range(2)
    ]
    with pytest.raises(ZeroDivisionError):
        io.load(blocks, IoContext(float("inf")))
    taken = staging.take(3)
    assert len(taken) == 2
    for call in mover.held:
        call()
    assert sorted(taken + staging.take(3)) == [0, 1, 2]


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

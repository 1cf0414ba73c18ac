"""Leases against a list of what every reader holds; and what a reader keeps of them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tier_mover import random_keys

from commutator.kv import PeerAnswer, PeerBlock
from commutator.kv.peer_leases import LeaseTable
from commutator_peer.lent import LentBlocks

LEASE_S = 10.0
MOST = 6

grants = st.tuples(st.just("grant"), st.sets(st.integers(0, 4), max_size=4))
releases = st.tuples(
    st.just("release"), st.tuples(st.integers(0, 6), st.sets(st.integers(0, 5), max_size=4))
)
waits = st.tuples(st.just("wait"), st.floats(0, 15))


@given(st.lists(grants | releases | waits, max_size=40))
def test_every_pin_is_undone_exactly_once(steps: list[tuple[str, object]]) -> None:
    table, now_s = LeaseTable(LEASE_S, MOST), 0.0
    pins: Counter[int] = Counter()
    leases: dict[int, tuple[float, set[int]]] = {}
    for kind, what in steps:
        if kind == "grant" and isinstance(what, set):
            held = sum(len(slots) for _, slots in leases.values())
            assert table.room == MOST - held
            if len(what) > table.room:
                with pytest.raises(ValueError, match="cannot be kept"):
                    table.grant(what, now_s)
                continue
            lease = table.grant(what, now_s)
            assert lease not in leases
            leases[lease] = (now_s + LEASE_S, set(what))
            pins.update(what)
        elif kind == "release" and isinstance(what, tuple):
            lease, slots = what
            freed = table.release(lease, slots)
            _, kept = leases.get(lease, (0.0, set[int]()))
            assert set(freed) == kept & slots
            kept -= slots
            pins.subtract(freed)
        elif isinstance(what, float):
            now_s += what
            freed = table.expire(now_s)
            over = [lease for lease, (end_s, _) in leases.items() if end_s <= now_s]
            assert Counter(freed) == Counter(s for lease in over for s in leases.pop(lease)[1])
            pins.subtract(freed)
        assert table.kept == sum(pins.values())
        assert min(pins.values(), default=0) >= 0
    pins.subtract(table.end_all())
    assert not any(pins.values())
    assert table.room == MOST


def answer(count: int, lease: int = 1) -> PeerAnswer:
    return PeerAnswer(
        number=1,
        agent="peer",
        metadata=b"m",
        lease=lease,
        lease_s=LEASE_S,
        blocks=[
            PeerBlock(slot=100 + n, address=4096 * n, size_bytes=10, device=0, checksum=n)
            for n in range(count)
        ],
    )


def test_a_lent_block_is_given_back_by_its_last_reader() -> None:
    [key], lent = random_keys(1), LentBlocks()
    lent.add(key, answer(1), 0, "tcp://peer", ends_s=5.0)
    stored = lent.lookup(key, 1.0)
    assert stored is not None
    lent.pin(stored.slot)
    lent.pin(stored.slot)
    assert lent.forget(key) is None
    assert lent.unpin(stored.slot) is None
    given_back = lent.unpin(stored.slot)
    assert given_back is not None
    assert given_back.peer_slot == 100
    with pytest.raises(ValueError, match="free"):
        lent.pin(stored.slot)


def test_a_lent_block_is_not_known_after_its_time_but_its_reader_may_end() -> None:
    keys, lent = random_keys(2), LentBlocks()
    for index, key in enumerate(keys):
        lent.add(key, answer(2), index, "tcp://peer", ends_s=5.0)
    stored = lent.lookup(keys[0], 4.9)
    assert stored is not None
    lent.pin(stored.slot)
    assert lent.lookup(keys[0], 5.0) is None
    lent.expire(5.0)
    assert lent.lent(stored.slot).stored == stored
    assert lent.statistics(5.0).committed == 0
    assert lent.statistics(5.0).pinned == 1


def test_a_block_lent_anew_while_the_old_one_is_read_is_another_slot() -> None:
    [key], lent = random_keys(1), LentBlocks()
    lent.add(key, answer(1), 0, "tcp://peer", ends_s=5.0)
    old = lent.lookup(key, 1.0)
    assert old is not None
    lent.pin(old.slot)
    lent.forget(key)
    lent.add(key, answer(1, lease=2), 0, "tcp://peer", ends_s=9.0)
    new = lent.lookup(key, 1.0)
    assert new is not None
    assert new.slot != old.slot
    lent.unpin(old.slot)
    assert lent.lookup(key, 1.0) == new

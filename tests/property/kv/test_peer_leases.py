"""Leases of look-ups, against a list of what every reader holds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.tier import Span
from commutator_engine_kit.kv.transfer.exporter import BlockExporter
from commutator_engine_kit.kv.transfer.protocol import ExportState, ReadyBlock

LEASE_S = 10.0
MOST = 6

ids = st.sampled_from("abcdefg")
lendings = st.tuples(st.just("lend"), ids, st.sets(st.integers(0, 4), max_size=4))
releases = st.tuples(
    st.just("release"), ids, st.none() | st.sets(st.integers(0, 5), min_size=1, max_size=4)
)
waits = st.tuples(st.just("wait"), st.just(""), st.floats(0, 15))


def blocks_of(slots: set[int]) -> list[ReadyBlock]:
    return [ReadyBlock(slot, bytes([slot]), slot, Span(4096 * slot, 10)) for slot in slots]


@given(st.lists(lendings | releases | waits, max_size=40))
def test_every_pin_is_undone_exactly_once(steps: list[tuple[str, str, object]]) -> None:
    now_s = 0.0
    exporter = BlockExporter(lambda: None, most_blocks=MOST, clock=lambda: now_s)
    pins: Counter[int] = Counter()
    leases: dict[str, tuple[float, set[int]]] = {}
    over: set[str] = set()
    for kind, name, what in steps:
        if kind == "lend":
            assert isinstance(what, set)
            if name in leases or len(what) > exporter.room():
                with pytest.raises(ValueError, match=r"cannot be lent|begun already"):
                    exporter.lend(name, blocks_of(what), LEASE_S)
                continue
            lent = exporter.lend(name, blocks_of(what), LEASE_S)
            assert lent == (name not in over), "what was released before is never lent"
            if lent:
                leases[name] = (now_s + LEASE_S, set(what))
                pins.update(what)
        elif kind == "release":
            assert what is None or isinstance(what, set)
            exporter.release(name, what)
            freed = exporter.take_freed()
            _, kept = leases.get(name, (0.0, set[int]()))
            assert set(freed) == (kept if what is None else kept & what)
            pins.subtract(freed)
            kept -= set(freed)
            if what is None or not kept:
                leases.pop(name, None)
                over.add(name)
        else:
            assert isinstance(what, float)
            now_s += what
            exporter.expire()
            freed = exporter.take_freed()
            lapsed = [name for name, (end_s, _) in leases.items() if end_s <= now_s]
            assert Counter(freed) == Counter(s for each in lapsed for s in leases.pop(each)[1])
            over.update(lapsed)
            pins.subtract(freed)
        assert exporter.room() == MOST - sum(pins.values())
        assert Counter(exporter.held()) == +pins
        assert exporter.statistics().active == len(leases)
    pins.subtract(exporter.fail_all("the exporter is closed"))
    assert not any(pins.values())
    assert exporter.room() == MOST


def test_a_lease_of_a_look_up_is_complete_at_once() -> None:
    exporter = BlockExporter(lambda: None)
    blocks = blocks_of({1, 2, 3})
    assert exporter.lend("a", blocks, LEASE_S)
    update = exporter.news("a", 1)
    assert (update.state, list(update.blocks)) == (ExportState.COMPLETE, blocks[1:])

"""The plan of an hour of chaos: from a seed, within its bounds, and never two faults too many."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.chaos_plan import CLOCK_JUMP_S, Fault, Kind, Places, plan

DOORS, WORKERS, ETCD = ("h1", "h2"), ("h2", "h3"), ("h4", "h5", "h6")
PLACES = Places(doors=DOORS, workers=WORKERS, etcd=ETCD, nats=("h7",), spared="h2")
HOUR_S = 3600.0
REST_S = (10.0, 20.0)

seeds = st.integers(0, 2**32)
lengths_s = st.floats(0, HOUR_S)


def overlap(one: Fault, other: Fault) -> bool:
    return one.at_s <= other.ends_s and other.at_s <= one.ends_s


@given(seed=seeds, length_s=lengths_s)
def test_a_seed_is_a_plan(seed: int, length_s: float) -> None:
    faults = plan(seed, length_s, PLACES, REST_S)
    assert faults == plan(seed, length_s, PLACES, REST_S)
    for fault in faults:
        assert 0 < fault.at_s <= fault.ends_s <= length_s
        assert abs(fault.offset_s) <= CLOCK_JUMP_S
        assert str(fault)


@given(seed=seeds, length_s=lengths_s)
def test_two_faults_at_most_and_not_of_two_hosts(seed: int, length_s: float) -> None:
    faults = plan(seed, length_s, PLACES, REST_S)
    for fault in faults:
        others = [one for one in faults if one is not fault and overlap(one, fault)]
        assert len(others) <= 1
        assert all(one.is_shared != fault.is_shared for one in others)
        if fault.kind is Kind.COMPACTED_UNSEEN:
            assert not any(one.kind.name.startswith("ETCD_") for one in others), "it needs quorum"
    for one, other in pairwise(faults):
        if not overlap(one, other):
            assert other.at_s - one.ends_s >= REST_S[0] - 1e-6


@given(seed=seeds)
def test_what_befalls_where(seed: int) -> None:
    for fault in plan(seed, HOUR_S, PLACES, REST_S):
        assert fault.place != fault.other or not fault.place
        match fault.kind:
            case Kind.DOOR_KILLED:
                assert fault.place in (("h1",) if fault.at_s > HOUR_S / 5 else DOORS)
            case Kind.WORKER_KILLED:
                assert fault.place in WORKERS
            case Kind.CUT_FROM_DOOR:
                assert fault.place in WORKERS
                assert fault.other in DOORS
            case Kind.HOST_KILLED | Kind.HOST_VANISHED if fault.at_s > HOUR_S / 5:
                assert fault.place in {"h1", "h3"}
            case kind if kind.name.startswith("ETCD_"):
                assert fault.place in (*ETCD, "")
            case kind if kind.name.startswith("NATS_"):
                assert fault.place == "h7"
            case _:
                assert fault.place in {"h1", "h2", "h3"}


@given(seed=seeds)
def test_an_hour_has_every_kind_several_times(seed: int) -> None:
    counted = Counter(fault.kind for fault in plan(seed, HOUR_S, PLACES, REST_S))
    assert set(counted) == set(Kind)
    assert max(counted.values()) - min(counted.values()) <= 1


def test_without_nats_nothing_befalls_it() -> None:
    places = Places(doors=DOORS, workers=WORKERS, etcd=ETCD)
    kinds = {fault.kind for fault in plan(1, HOUR_S, places, REST_S)}
    assert kinds == {kind for kind in Kind if not kind.name.startswith("NATS_")}


def test_someone_must_be_left() -> None:
    with pytest.raises(ValueError, match="another one that serves"):
        plan(1, 60.0, Places(doors=("h1",), workers=WORKERS, etcd=ETCD), REST_S)
    with pytest.raises(ValueError, match="rest_s"):
        plan(1, 60.0, PLACES, (2.0, 1.0))

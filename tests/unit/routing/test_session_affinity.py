"""Sessions whose worker is left out, and what a changed set of candidates costs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.work import calls_of

from commutator.contract.routing import Candidate, Decision, RouteRequest, WorkerLoad
from commutator_session_affinity import HashRing, SessionAffinity, SessionAffinityConfig
from commutator_testing.routers import make_candidate


def affinity() -> SessionAffinity:
    return SessionAffinity(SessionAffinityConfig(kind="session_affinity"))


def pick(policy: SessionAffinity, candidates: Sequence[Candidate], name: str = "s") -> Decision:
    request = RouteRequest(request_id=f"r-{name}", model="model", prompt_tokens=10, session_id=name)
    return policy.pick(request, candidates, random.Random(3))


def workers(count: int) -> list[Candidate]:
    return [make_candidate(f"w-{number}") for number in range(count)]


def test_the_reason_names_the_home_that_was_left_out_as_busy() -> None:
    policy = affinity()
    home = pick(policy, workers(4)).worker_id
    rest = [candidate for candidate in workers(4) if candidate.worker_id != home]
    decision = pick(policy, rest)
    assert decision.worker_id != home
    assert f"next after {home}, which is no candidate now" in decision.reason
    back = pick(policy, workers(4))
    assert back.worker_id == home
    assert "its worker" in back.reason


def test_a_worker_that_is_gone_is_home_to_no_session() -> None:
    policy = affinity()
    home = pick(policy, workers(4)).worker_id
    policy.forget(home)
    rest = [candidate for candidate in workers(4) if candidate.worker_id != home]
    assert "its worker" in pick(policy, rest).reason


def test_all_ranks_of_a_worker_go_with_it() -> None:
    hashed = affinity()._ring
    hashed.add(["w@0", "w@1", "w-1"])
    policy = affinity()
    policy._ring = hashed
    policy.forget("w")
    assert set(hashed.walk("s")) == {"w-1"}


@settings(deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=1, max_size=8),
    st.lists(st.integers(0, 5), min_size=8, max_size=8),
)
def test_workers_seen_before_change_no_decision(turns: list[set[int]], loads: list[int]) -> None:
    """A ring with places of absent workers leads to the same as one made of who is there."""
    policy = affinity()
    for turn in turns:
        there = [make_candidate(f"w-{i}", WorkerLoad(active_requests=loads[i])) for i in turn]
        for name in "abcd":
            assert pick(policy, there, name).worker_id == pick(affinity(), there, name).worker_id


def test_workers_that_go_without_news_are_given_up_some_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("commutator_session_affinity._REMEMBERED", 8)
    hashed = HashRing(4)
    for number in range(100):
        hashed.add([f"w-{number}", f"w-{number + 1}"])
        assert len(hashed._workers) <= 8
        assert len(hashed._ring) == 4 * len(hashed._workers)


def test_a_changed_set_of_candidates_costs_no_new_ring() -> None:
    policy, all_of_them = affinity(), workers(64)
    pick(policy, all_of_them)
    for left_out in range(64):
        some = all_of_them[:left_out] + all_of_them[left_out + 1 :]
        calls = calls_of(lambda: pick(policy, some))  # noqa: B023 - at once
        assert calls < 1_000, "a new ring takes more than that"

"""The conformance suite for routing policies: subclass, give a factory, run pytest."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commutator.routing.contract import (
    Candidate,
    Decision,
    Overlap,
    RouteRequest,
    RoutingPolicy,
    WorkerLoad,
)
from commutator.types import EngineInfo, WorkerRecord

__all__ = ["RouterContract", "make_candidate"]


def make_candidate(
    worker_id: str, load: WorkerLoad | None = None, overlap: Overlap | None = None
) -> Candidate:
    """A live worker, for tests of a policy."""
    info = EngineInfo("test", "1", "model", 4096, 16, 1024)
    record = WorkerRecord(worker_id, "engine", "test", "model", "127.0.0.1:1", info)
    return Candidate(record, load or WorkerLoad(), overlap or Overlap())


_loads = st.builds(
    WorkerLoad,
    active_requests=st.integers(0, 50),
    active_prefill_tokens=st.integers(0, 100_000),
    active_decode_blocks=st.integers(0, 10_000),
)
_states = st.tuples(_loads, st.builds(Overlap, *(st.integers(0, 500) for _ in range(4))))
_requests = st.builds(
    RouteRequest,
    request_id=st.uuids().map(str),
    model=st.just("model"),
    prompt_tokens=st.integers(1, 50_000),
    max_tokens=st.integers(1, 4096),
    session_id=st.none() | st.sampled_from(["alice", "bob"]),
    priority=st.integers(-3, 3),
)
_pools = st.dictionaries(st.integers(0, 99).map("w-{:02}".format), _states, min_size=1, max_size=5)
History = list[tuple[RouteRequest, dict[str, tuple[WorkerLoad, Overlap]]]]
_histories = st.lists(st.tuples(_requests, _pools), min_size=1, max_size=10)


# One inherited test runs for many policies, and histories are large values to draw.
_settings = settings(
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class RouterContract:
    """What every policy must hold to. ``make_policy`` returns a fresh policy each time."""

    def make_policy(self) -> RoutingPolicy:
        raise NotImplementedError("return a fresh instance of the policy under test")

    def _decide(self, history: History) -> list[Decision]:
        """One policy's decisions over a history in which workers come and go."""
        policy, rng, known = self.make_policy(), random.Random(7), set[str]()  # noqa: S311
        decisions = []
        for request, pool in history:
            for gone in known - set(pool):
                policy.forget(gone)
            known = set(pool)
            candidates = [make_candidate(name, *state) for name, state in sorted(pool.items())]
            before = copy.copy(candidates)
            decision = policy.pick(request, candidates, rng)
            check_decision(decision, candidates)
            assert candidates == before, "a policy must not change its candidates"
            decisions.append(decision)
        return decisions

    @_settings
    @given(_histories)
    def test_picks_a_candidate_and_explains_it(self, history: History) -> None:
        self._decide(history)

    @_settings
    @given(_histories)
    def test_equal_history_and_chance_give_equal_decisions(self, history: History) -> None:
        assert self._decide(history) == self._decide(history)

    def test_forgetting_an_unknown_worker_is_harmless(self) -> None:
        self.make_policy().forget("never-seen")

    def test_every_worker_of_an_idle_pool_gets_work(self) -> None:
        """Over many different requests, no idle worker is left out for good."""
        policy, rng = self.make_policy(), random.Random(1)  # noqa: S311
        candidates = [make_candidate(f"w-{i}") for i in range(4)]
        chosen = {
            policy.pick(
                RouteRequest(f"r-{i}", "model", 100 + i, session_id=f"s-{i}"), candidates, rng
            ).worker_id
            for i in range(400)
        }
        assert chosen == {candidate.worker_id for candidate in candidates}


def check_decision(decision: Decision, candidates: Sequence[Candidate]) -> None:
    """Assert that a decision is one of the candidates and says why."""
    ids = {candidate.worker_id for candidate in candidates}
    assert decision.worker_id in ids, f"picked {decision.worker_id}, which is no candidate"
    assert decision.policy, "a decision names its policy"
    assert decision.reason, "a decision gives its reason"
    assert set(decision.scores) <= ids, "scores belong to candidates"

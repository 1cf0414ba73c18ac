"""The conformance suite for routing policies: subclass it, define a factory, run pytest."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from commutator import Candidate, Decision, Overlap, RouteRequest, RoutingPolicy, WorkerLoad
from commutator.contract.routing import Cost, LeastCost, ScannedPool
from commutator_testing.profile import suite_settings
from commutator_testing.shared import make_record


def make_candidate(
    worker_id: str, load: WorkerLoad | None = None, overlap: Overlap | None = None
) -> Candidate:
    """A candidate for tests of a policy."""
    return Candidate(
        worker=make_record(worker_id), load=load or WorkerLoad(), overlap=overlap or Overlap()
    )


def _worker_states(
    requests: st.SearchStrategy[int],
    tokens: st.SearchStrategy[int],
    decode_blocks: st.SearchStrategy[int],
    cached_blocks: st.SearchStrategy[int],
) -> st.SearchStrategy[tuple[WorkerLoad, Overlap]]:
    load = st.builds(
        WorkerLoad,
        active_requests=requests,
        active_prefill_tokens=tokens,
        active_decode_blocks=decode_blocks,
    )
    names = ("device", "host", "disk", "external")
    return st.tuples(load, st.builds(Overlap, **dict.fromkeys(names, cached_blocks)))


_states = _worker_states(
    st.integers(0, 50), st.integers(0, 100_000), st.integers(0, 10_000), st.integers(0, 500)
)

_extreme_states = _worker_states(*[st.sampled_from([0, 1, 2**31, 10**15])] * 4)

_requests = st.builds(
    RouteRequest,
    request_id=st.uuids().map(str),
    model=st.just("model"),
    # 0 of a prompt that only the engine can tokenize, such as one with pictures
    prompt_tokens=st.just(0) | st.integers(1, 50_000),
    max_tokens=st.integers(1, 4096),
    session_id=st.none() | st.sampled_from(["alice", "bob"]),
    priority=st.integers(-3, 3),
)

_names = st.integers(0, 99).map("w-{:02}".format)

_pools = st.dictionaries(_names, _states, min_size=1, max_size=5)

_extreme_pools = st.dictionaries(_names, _extreme_states, min_size=1, max_size=5)

History = list[tuple[RouteRequest, dict[str, tuple[WorkerLoad, Overlap]]]]

_histories = st.lists(st.tuples(_requests, _pools), min_size=1, max_size=10)

_extreme_histories = st.lists(st.tuples(_requests, _extreme_pools), min_size=1, max_size=5)

_settings = suite_settings(30)


class CheckedPool(ScannedPool):
    """A pool that asserts of each cost that it rises with loads and falls with overlaps at most."""

    def at_most_requests(self, limit: float) -> CheckedPool:
        return CheckedPool(list(super().at_most_requests(limit)))

    def least(self, cost: Cost) -> LeastCost:
        for one in self:
            its = cost(one.load, one.overlap)
            for name in ("active_requests", "active_prefill_tokens", "active_decode_blocks"):
                more = evolve(one.load, **{name: getattr(one.load, name) + 1})
                assert cost(more, one.overlap) >= its, f"the cost falls when {name} grows"
            for name in ("device", "host", "disk", "external"):
                longer = evolve(one.overlap, **{name: getattr(one.overlap, name) + 1})
                assert cost(one.load, longer) <= its, f"the cost rises with blocks on {name}"
        return super().least(cost)


class RouterContract:
    """What every routing policy must do. ``make_policy`` returns a fresh policy each time."""

    documented_in = (
        "RoutingPolicy in docs/reference/contract/routing.md and "
        "docs/tutorial/first-routing-policy.md"
    )

    def make_policy(self) -> RoutingPolicy:
        raise NotImplementedError("return a fresh instance of the policy under test")

    def _decide(
        self, history: History, *, news: bool = True, pooled: bool = False
    ) -> list[Decision]:
        """One policy's decisions over a history in which workers come and go.

        Without ``news`` the policy is not informed of workers that leave. ``pooled``: it gets its
        candidates as a pool, as among many workers.
        """
        policy, rng, known = self.make_policy(), random.Random(7), set[str]()
        decisions = []
        for request, pool in history:
            for gone in sorted(known - set(pool)) if news else ():
                policy.forget(gone)
            known = set(pool)
            candidates = [make_candidate(name, *state) for name, state in sorted(pool.items())]
            before = copy.copy(candidates)
            given = CheckedPool(candidates) if pooled else candidates
            decision = policy.pick(request, given, rng)
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

    @_settings
    @given(_histories)
    def test_a_pool_leads_to_the_same_decisions(self, history: History) -> None:
        """A policy that asks its pool for what costs least must keep to the rules of ``Cost``."""
        assert self._decide(history, pooled=True) == self._decide(history)

    @_settings
    @given(_histories)
    def test_workers_may_vanish_without_news(self, history: History) -> None:
        """A worker leaves the candidates first; the policy learns of it later or never."""
        self._decide(history, news=False)

    @_settings
    @given(_extreme_histories)
    def test_absurd_loads_and_overlaps_do_no_harm(self, history: History) -> None:
        """Wrong counters, or events of another prompt, must not stop requests."""
        self._decide(history)

    @_settings
    @given(_requests, _states | _extreme_states)
    def test_the_only_candidate_is_taken(
        self, request_: RouteRequest, state: tuple[WorkerLoad, Overlap]
    ) -> None:
        candidate = make_candidate("only", *state)
        rng = random.Random(5)
        assert self.make_policy().pick(request_, [candidate], rng).worker_id == "only"

    @_settings
    @given(_histories)
    def test_no_cache_is_known(self, history: History) -> None:
        """KV events that never come leave every overlap empty."""
        bare = [
            (request, {name: (load, Overlap()) for name, (load, _) in pool.items()})
            for request, pool in history
        ]
        self._decide(bare)

    def test_a_forgotten_worker_may_stay(self) -> None:
        """Its lease lapsed and came back before the next request."""
        policy, rng = self.make_policy(), random.Random(2)
        candidates = [make_candidate(f"w-{i}") for i in range(3)]
        for number in range(20):
            request = RouteRequest(request_id=f"r-{number}", model="model", prompt_tokens=100)
            check_decision(policy.pick(request, candidates, rng), candidates)
            policy.forget(f"w-{number % 3}")

    def test_ranks_are_candidates_of_their_own(self) -> None:
        policy, rng = self.make_policy(), random.Random(4)
        one = make_candidate("w")
        info = evolve(one.worker.info, data_parallel_size=2)
        ranks = [Candidate(worker=evolve(one.worker, info=info), rank=rank) for rank in (0, 1)]
        for number in range(20):
            request = RouteRequest(
                request_id=f"r-{number}", model="model", prompt_tokens=100, session_id=f"s-{number}"
            )
            check_decision(policy.pick(request, ranks, rng), ranks)

    def test_forgetting_an_unknown_worker_is_harmless(self) -> None:
        self.make_policy().forget("never-seen")

    def test_every_worker_of_an_idle_pool_gets_work(self) -> None:
        """Over many different requests, no idle worker is left out for good."""
        policy, rng = self.make_policy(), random.Random(1)
        candidates = [make_candidate(f"w-{i}") for i in range(4)]
        chosen = {
            policy.pick(
                RouteRequest(
                    request_id=f"r-{i}", model="model", prompt_tokens=100 + i, session_id=f"s-{i}"
                ),
                candidates,
                rng,
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

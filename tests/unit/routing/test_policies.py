"""What each policy prefers, by worked examples."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from attrs import evolve

from commutator.contract.routing import (
    Candidate,
    Decision,
    Overlap,
    RouteRequest,
    Scorer,
    WorkerLoad,
)
from commutator_balance import LeastLoaded, PowerOfTwo
from commutator_kv_router import KvRouter, KvRouterConfig
from commutator_pipeline.policy import Pipeline, PipelineConfig
from commutator_pipeline.stages import DrawPicker, LoadScorer, MaxRequests, PrefixScorer
from commutator_round_robin import RoundRobin
from commutator_session_affinity import SessionAffinity, SessionAffinityConfig
from commutator_testing.routers import make_candidate

REQUEST = RouteRequest(request_id="r", model="model", prompt_tokens=160, block_size=16)


def rng() -> random.Random:
    return random.Random(3)


def kv(**options: object) -> KvRouter:
    return KvRouter(KvRouterConfig(kind="kv", **options))  # type: ignore[arg-type]


def test_kv_cost_is_the_wait_for_the_queue_and_what_the_prefill_makes_others_wait() -> None:
    load = WorkerLoad(active_requests=3, active_prefill_tokens=320, active_decode_blocks=32)
    candidates = [
        make_candidate("w-0", load, Overlap(device=4, host=2, disk=4, external=2)),
        make_candidate("w-1", WorkerLoad(active_requests=2)),
    ]
    decision = kv().pick(REQUEST, candidates, rng())
    # credit = 4 + 1.5 + 1 + 1 = 7.5, new = 10 - 7.5; cost = 320/16 + 2.5 * (1 + 5/2) + 32/16
    assert decision.scores == {
        "w-0": {
            "cost": 30.75,
            "prefill_blocks": 2.5,
            "cache_credit_blocks": 7.5,
            "decode_blocks": 32.0,
            "queue_blocks": 20.0,
            "mean_requests": 2.5,
        },
        "w-1": {
            "cost": 35.0,
            "prefill_blocks": 10.0,
            "cache_credit_blocks": 0.0,
            "decode_blocks": 0.0,
            "queue_blocks": 0.0,
            "mean_requests": 2.5,
        },
    }
    assert decision.worker_id == "w-0"


def test_kv_waits_longer_for_a_cache_the_more_requests_a_prefill_would_delay() -> None:
    """A queue of 30 blocks before a worker that holds 8 of the prompt's 10."""

    def chosen(requests: int) -> str:
        queued = WorkerLoad(active_requests=requests, active_prefill_tokens=30 * 16)
        warm = make_candidate("w-0", queued, Overlap(device=8))
        cold = make_candidate("w-1", WorkerLoad(active_requests=requests))
        return kv().pick(REQUEST, [warm, cold], rng()).worker_id

    assert [chosen(requests) for requests in (0, 2, 3, 9)] == ["w-1", "w-1", "w-0", "w-0"]


def test_kv_counts_the_requests_of_workers_that_the_guard_leaves_out() -> None:
    hot = make_candidate("w-0", WorkerLoad(active_requests=90), Overlap(device=10))
    idle = [make_candidate("w-1"), make_candidate("w-2")]
    decision = kv().pick(REQUEST, [hot, *idle], rng())
    assert decision.worker_id != "w-0"
    assert {one["mean_requests"] for one in decision.scores.values()} == {30}


def test_kv_weight_without_its_formula_is_refused() -> None:
    for formula in ("delay", "product"):
        with pytest.raises(ValueError, match="only `formula: cost` uses it"):
            kv(formula=formula, overlap_score_weight=2.0)


def test_kv_formula_cost_is_the_published_one() -> None:
    load = WorkerLoad(active_requests=3, active_prefill_tokens=320, active_decode_blocks=7)
    candidate = make_candidate("w-0", load, Overlap(device=4, host=2, disk=4, external=2))
    decision = kv(formula="cost", overlap_score_weight=2.0).pick(REQUEST, [candidate], rng())
    # raw = (320 + 160) / 16 = 30; credit = 4 + 1.5 + 1 + 1 = 7.5; cost = 2 * 22.5 + 7
    assert decision.scores["w-0"] == {
        "cost": 52.0,
        "prefill_blocks": 22.5,
        "cache_credit_blocks": 7.5,
        "decode_blocks": 7.0,
    }


def test_kv_product_is_new_prefill_times_batch() -> None:
    load = WorkerLoad(active_requests=3)
    candidate = make_candidate("w-0", load, Overlap(device=4))
    decision = kv(formula="product").pick(REQUEST, [candidate], rng())
    assert decision.scores["w-0"]["cost"] == (160 - 64) * 4


def test_kv_product_prefers_the_idle_one_of_those_that_hold_the_whole_prompt() -> None:
    candidates = [
        make_candidate("w-0", WorkerLoad(active_requests=20), Overlap(device=10)),
        make_candidate("w-1", WorkerLoad(), Overlap(device=10)),
    ]
    chance, policy = rng(), kv(formula="product")
    picked = [policy.pick(REQUEST, candidates, chance) for _ in range(50)]
    assert {decision.worker_id for decision in picked} == {"w-1"}
    assert [picked[0].scores[name]["cost"] for name in ("w-0", "w-1")] == [21, 1]


def test_kv_goes_where_the_prefix_is_unless_that_worker_is_busy() -> None:
    warm = make_candidate("w-0", WorkerLoad(), Overlap(device=8))
    cold = make_candidate("w-1")
    assert kv().pick(REQUEST, [warm, cold], rng()).worker_id == "w-0"
    busy = make_candidate(
        "w-0",
        WorkerLoad(active_requests=2, active_prefill_tokens=300, active_decode_blocks=50),
        Overlap(device=8),
    )
    for formula in ("delay", "cost", "product"):
        assert kv(formula=formula).pick(REQUEST, [busy, cold], rng()).worker_id == "w-1"


def test_kv_breaks_ties_by_lot() -> None:
    candidates = [make_candidate(f"w-{i}") for i in range(3)]
    chance, policy = rng(), kv()
    counts = Counter(policy.pick(REQUEST, candidates, chance).worker_id for _ in range(300))
    assert min(counts.values()) > 60


def test_kv_temperature_spreads() -> None:
    candidates = [make_candidate("w-0", None, Overlap(device=9)), make_candidate("w-1")]
    chance = rng()
    warm, hot = kv(router_temperature=0.2), kv(router_temperature=50.0)
    few = sum(warm.pick(REQUEST, candidates, chance).worker_id == "w-1" for _ in range(500))
    many = sum(hot.pick(REQUEST, candidates, chance).worker_id == "w-1" for _ in range(500))
    assert few < 25
    assert 200 < many < 300


def test_kv_guards_against_the_hot_prefix() -> None:
    """Every request has the same prefix; without the guard one worker would take them all."""
    load = WorkerLoad(active_requests=1, active_decode_blocks=90)
    idle = [make_candidate(f"w-{number}", load) for number in (1, 2, 3)]

    def chosen(requests: int, **options: object) -> Decision:
        hot = make_candidate("w-0", WorkerLoad(active_requests=requests), Overlap(device=10))
        return kv(**options).pick(REQUEST, [hot, *idle], rng())

    # 45 is 33 more than the average of 12, and 41 is 30 more than that of 11
    assert chosen(45, imbalance_requests=32).worker_id != "w-0"
    assert "1 too busy" in chosen(45, imbalance_requests=32).reason
    assert chosen(41, imbalance_requests=32).worker_id == "w-0"
    assert chosen(45, imbalance_requests=32, imbalance_ratio=4.0).worker_id == "w-0"


@pytest.mark.parametrize("policy", [LeastLoaded, PowerOfTwo])
def test_load_policies_take_the_idle_one(policy: type[LeastLoaded | PowerOfTwo]) -> None:
    busy = make_candidate(
        "w-0", WorkerLoad(active_requests=1, active_prefill_tokens=1600, active_decode_blocks=100)
    )
    idle = make_candidate(
        "w-1", WorkerLoad(active_requests=9, active_prefill_tokens=0, active_decode_blocks=20)
    )
    made = policy()
    assert made.pick(REQUEST, [busy, idle], rng()).worker_id == "w-1"


def session(name: str) -> RouteRequest:
    return RouteRequest(request_id=f"r-{name}", model="model", prompt_tokens=10, session_id=name)


def affinity() -> SessionAffinity:
    return SessionAffinity(SessionAffinityConfig(kind="session_affinity"))


def test_a_session_stays_and_few_move_when_a_worker_comes() -> None:
    policy = affinity()
    four = [make_candidate(f"w-{i}") for i in range(4)]
    five = [*four, make_candidate("w-4")]
    sessions = [session(f"s-{i}") for i in range(400)]
    before = [policy.pick(s, four, rng()).worker_id for s in sessions]
    assert before == [policy.pick(s, four, rng()).worker_id for s in sessions]
    after = [policy.pick(s, five, rng()).worker_id for s in sessions]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"w-4"}
    assert len(moved) < 160


def test_a_full_worker_hands_its_sessions_to_the_next() -> None:
    policy = affinity()
    idle = [make_candidate(f"w-{i}") for i in range(3)]
    home = policy.pick(session("s"), idle, rng()).worker_id
    full = [
        Candidate(
            worker=c.worker, load=WorkerLoad(active_requests=30 if c.worker_id == home else 1)
        )
        for c in idle
    ]
    decision = policy.pick(session("s"), full, rng())
    assert decision.worker_id != home
    assert "at its limit" in decision.reason


def test_pipeline_filters_scores_and_explains() -> None:
    config = PipelineConfig(
        kind="pipeline",
        filters=(MaxRequests(kind="max_requests", limit=5),),
        scorers=(PrefixScorer(kind="prefix", weight=2.0), LoadScorer(kind="load")),
    )
    candidates = [
        make_candidate("w-0", WorkerLoad(active_requests=9), Overlap(device=10)),
        make_candidate(
            "w-1",
            WorkerLoad(active_requests=1, active_prefill_tokens=0, active_decode_blocks=10),
            Overlap(device=5),
        ),
        make_candidate("w-2"),
    ]
    decision = Pipeline(config).pick(REQUEST, candidates, rng())
    assert "max_requests left 1 out" in decision.reason
    assert decision.scores == {
        "w-1": {"prefix": 1.0, "load": 0.0, "total": 1.0},
        "w-2": {"prefix": 0.0, "load": 1.0, "total": 1.0},
    }


def scored(*scorers: Scorer) -> Decision:
    """What a pipeline of these says of two workers; w-0 holds a quarter of the prompt."""
    candidates = [
        make_candidate(
            "w-0",
            WorkerLoad(active_requests=1, active_prefill_tokens=0, active_decode_blocks=10),
            Overlap(host=5),
        ),
        make_candidate("w-1"),
    ]
    config = PipelineConfig(kind="pipeline", scorers=scorers)
    return Pipeline(config).pick(REQUEST, candidates, rng())


def test_a_scorer_may_be_there_twice() -> None:
    decision = scored(
        PrefixScorer(kind="prefix", weight=4.0, host=0.5),
        LoadScorer(kind="load"),
        PrefixScorer(kind="prefix", host=1.0),
    )
    assert decision.worker_id == "w-0"
    assert decision.scores == {
        "w-0": {"prefix": 1.0, "load": 0.0, "prefix#2": 0.5, "total": 1.5},
        "w-1": {"prefix": 0.0, "load": 1.0, "prefix#2": 0.0, "total": 1.0},
    }


def test_a_scorer_named_total_does_not_replace_the_sum() -> None:
    decision = scored(LoadScorer(kind="total"), PrefixScorer(kind="prefix", weight=4.0, host=0.5))
    assert decision.scores["w-1"] == {"total#2": 1.0, "prefix": 0.0, "total": 1.0}
    assert decision.scores["w-0"]["total"] == 1.0


def test_a_pipeline_without_scorers_is_refused() -> None:
    with pytest.raises(ValueError, match="scorers: without any, workers are chosen at random"):
        PipelineConfig(kind="pipeline", scorers=())


def test_nothing_is_held_of_a_prompt_without_tokens() -> None:
    empty = RouteRequest(request_id="r", model="model", prompt_tokens=0)
    candidates = [make_candidate("w-0", None, Overlap(device=3)), make_candidate("w-1")]
    assert PrefixScorer(kind="prefix").score(empty, candidates) == {"w-0": 0.0, "w-1": 0.0}


def test_a_filter_that_would_leave_no_worker_is_skipped() -> None:
    config = PipelineConfig(
        kind="pipeline",
        filters=(MaxRequests(kind="max_requests", limit=1),),
        scorers=(LoadScorer(kind="load"),),
        picker=DrawPicker(kind="draw"),
    )
    busy = [make_candidate(f"w-{i}", WorkerLoad(active_requests=3)) for i in range(2)]
    assert "was skipped" in Pipeline(config).pick(REQUEST, busy, rng()).reason


def test_every_rank_of_every_worker_has_its_turn() -> None:
    """Names of ranks are not in the order of the candidates: "w-1@10" is before "w-1@9"."""
    ranks: list[Candidate] = []
    for name in ("w-1", "w-10"):
        worker = make_candidate(name).worker
        worker = evolve(worker, info=evolve(worker.info, data_parallel_size=12))
        ranks += [Candidate(worker=worker, rank=rank) for rank in range(12)]
    policy = RoundRobin()
    picked = [policy.pick(REQUEST, ranks, rng()).worker_id for _ in range(2 * len(ranks))]
    assert picked == 2 * [candidate.worker_id for candidate in ranks]

"""The benchmark of routing policies: peers by worked examples, made-up traffic, intervals."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve
from bench import policies
from bench.peer_policies import ABLATIONS, DYNAMO_WEIGHTS, OURS, POLICIES, Ablated
from bench.shared_prefixes import documents, tenants

from commutator.contract.routing import Candidate, Overlap, RouteRequest, WorkerLoad
from commutator_replay.report import Report
from commutator_replay.trace import TraceRequest, checked, ideal_hit_ratio
from commutator_testing.routers import make_candidate

REQUEST = RouteRequest(request_id="r", model="model", prompt_tokens=160, block_size=16)


def pick(policy: str, *workers: tuple[int, int, int]) -> set[str]:
    """Whom it may choose of workers with requests, blocks in flight and cached blocks."""
    candidates: list[Candidate] = [
        make_candidate(
            f"w-{number}",
            WorkerLoad(active_requests=requests, active_decode_blocks=blocks),
            Overlap(device=cached),
        )
        for number, (requests, blocks, cached) in enumerate(workers)
    ]
    chance, chooses = random.Random(1), POLICIES[policy]()
    return {chooses.pick(REQUEST, candidates, chance).worker_id for _ in range(40)}


def test_sglang_follows_a_prefix_of_more_than_30_percent_while_loads_are_even() -> None:
    assert pick("SGLang", (9, 0, 4), (1, 0, 0), (1, 0, 0)) == {"w-0"}
    assert pick("SGLang", (9, 0, 3), (1, 0, 0), (1, 0, 0)) == {"w-1", "w-2"}
    assert pick("SGLang", (64, 0, 9), (0, 0, 0)) == {"w-0"}
    assert pick("SGLang", (65, 0, 9), (0, 0, 0)) == {"w-1"}
    assert pick("SGLang", (165, 0, 9), (110, 0, 0)) == {"w-0"}  # 1.5 times as many, and no more


def test_llmd_adds_up_prefix_queue_and_memory() -> None:
    # 3 * 0.5 + 2 * 0 + 2 * 1 = 3.5 against 0 + 2 + 2
    assert pick("llm-d", (2, 0, 5), (0, 0, 0)) == {"w-1"}
    # 3 * 0.8 + 0 + 2 = 4.4
    assert pick("llm-d", (2, 0, 8), (0, 0, 0)) == {"w-0"}
    # of 1,024 blocks of memory 512 are in use: 2.4 + 0 + 1 = 3.4
    assert pick("llm-d", (2, 512, 8), (0, 0, 0)) == {"w-1"}


def test_the_longest_prefix_alone_does_not_look_at_loads() -> None:
    assert pick("longest prefix", (99, 999, 2), (0, 0, 1)) == {"w-0"}


def test_dynamo_is_tried_with_its_default() -> None:
    assert DYNAMO_WEIGHTS[0] == 1
    # 10 - 5 + blocks in flight against 10
    assert pick("Dynamo, weight 1", (1, 4, 5), (0, 0, 0)) == {"w-0"}
    assert pick("Dynamo, weight 1", (1, 6, 5), (0, 0, 0)) == {"w-1"}


def test_ablations_change_one_part_of_the_cost_each() -> None:
    candidates = [
        make_candidate("w-0", WorkerLoad(active_requests=9, active_prefill_tokens=200)),
        make_candidate("w-1", WorkerLoad(active_requests=1, active_decode_blocks=100)),
    ]
    warm = evolve(candidates[0], overlap=Overlap(device=8))
    costs = {
        name: [rank for (rank,) in made.rank(REQUEST, [warm, candidates[1]])]
        for name, make in ABLATIONS.items()
        if isinstance(made := make(), Ablated)
    }
    # queues of 12.5 and 0 blocks, 2 and 10 to compute, 0 and 100 blocks in flight; 5 requests each
    assert costs == {
        "the request's own wait only": [12.5 + 2, 10 + 6.25],
        "the worker's own requests": [12.5 + 2 * 10, 10 * 2 + 6.25],
        "5 requests, whatever the load": [12.5 + 2 * 5, 10 * 5 + 6.25],
        "no term for decoding": [12.5 + 2 * 6, 10 * 6],
        "four times the term for decoding": [12.5 + 2 * 6, 10 * 6 + 25],
    }


@pytest.mark.parametrize("make", [tenants, documents])
def test_made_up_traffic_is_valid_shares_prefixes_and_depends_on_its_seed(
    make: Callable[[int, float, int], list[TraceRequest]],
) -> None:
    trace = make(300, 5.0, 1)
    assert trace == make(300, 5.0, 1) != make(300, 5.0, 2)
    assert 100 < len(trace) < 500
    assert checked(Path("made-up"), enumerate(trace, 1)) == trace
    assert ideal_hit_ratio(trace) > 0.3
    assert trace[-1].timestamp < 70_000


def test_halves_of_a_trace_have_no_request_in_common_and_keep_its_order(
    tmp_path: Path,
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        "".join(
            f'{{"timestamp": {3000 * n}, "input_length": {512 + n}, "output_length": 1, '
            f'"hash_ids": [{n}, {n + 1000}]}}\n'
            for n in range(10)
        )
    )
    first, second = (policies.Setting(str(file), 2.0, 100, half) for half in (0, 1))
    lengths = [[one.input_length - 512 for one in row.requests(1)] for row in (first, second)]
    assert lengths == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    times = [one.timestamp for one in second.requests(1)]
    assert all(0 <= 2 * time - 3000 * n <= 3000 for n, time in enumerate(times))
    assert times != [one.timestamp for one in second.requests(2)]
    assert first.name == "trace, half 1, x2, 100 blocks"


def test_an_interval_is_that_of_ratios_within_a_seed() -> None:
    mean, half = policies.interval([2, 4, 6, 8, 10], [1, 2, 3, 4, 5])
    assert (mean, half) == (2, 0)
    mean, half = policies.interval([1, 2, 3, 4, 5], [1, 1, 1, 1, 1])
    assert mean == 3
    assert half == pytest.approx(1.963, abs=1e-3)


def test_a_run_reports_and_the_best_weight_and_peer_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "REQUESTS", 60)
    row = policies.Setting("tenants", 8.0, 100)
    runs: dict[str, list[Report]] = {
        name: [policies.one_run(row, name, seed=1)] for name in POLICIES
    }
    assert len({one.requests for (one,) in runs.values()}) == 1
    assert runs[OURS] == [policies.one_run(row, OURS, seed=1)]
    runs["Dynamo, weight 16"] = [evolve(runs["Dynamo, weight 16"][0], ttft_p50_s=1e-6)]
    merged = policies.with_best_weight(runs)
    assert "Dynamo, weight 16" not in merged
    assert merged[policies.DYNAMO] == runs["Dynamo, weight 16"]
    best = policies.best_other(merged, lambda one: one.ttft_p50_s, highest=False)
    assert best == policies.DYNAMO

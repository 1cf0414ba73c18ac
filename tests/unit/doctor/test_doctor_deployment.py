"""Faults planted into what a front door says."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from commutator_doctor.deployment import DEPLOYMENT, Deployment, Trial, figures
from commutator_doctor.metrics import Metrics

WORKERS = [
    {"worker_id": f"w-{n}", "model": "m", "state": "ready", "kind": "vllm", "version": "0.32.0"}
    | {"block_size": 16, "host": "", "admin_address": "127.0.0.1:1"}
    for n in range(2)
]
HEALTH = {
    "status": "ready",
    "problems": [],
    "models": ["m"],
    "workers": WORKERS,
    "unready_workers": [],
    "registry_age_s": 0.5,
    "registry": "127.0.0.1:7700",
    "refused_handovers": [],
}
PAGE = """
# HELP commutator_requests_total Requests.
commutator_requests_total{code="200",endpoint="/v1/chat/completions",model="m"} 100
commutator_time_to_first_token_seconds_count{model="m"} 100
commutator_time_to_first_token_seconds_sum{model="m"} 20
commutator_router_queue_seconds_sum{model="m"} 1
commutator_router_decision_seconds_count{model="m"} 100
commutator_router_decision_seconds_sum{model="m"} 0.05
commutator_prompt_tokens_total{model="m"} 100000
commutator_cached_tokens_total{model="m"} 60000
commutator_input_sequence_tokens_count{model="m"} 100
commutator_input_sequence_tokens_sum{model="m"} 100000
commutator_router_overlap_blocks_total{model="m"} 3800
commutator_router_given_up_blocks_total{model="m"} 10
commutator_model_ready{model="m"} 1
commutator_worker_active_requests{model="m",role="both",worker="w-0"} 4
commutator_worker_active_requests{model="m",role="both",worker="w-1"} 5
commutator_kv_tier_up{tier="dram",worker="w-0"} 1
commutator_queued_requests 0
commutator_router_fallbacks_total{model="m"} 0
"""
HEALTHY = Deployment(
    url="http://127.0.0.1:8000",
    health=HEALTH,
    metrics=Metrics.parse(PAGE),
    answer_s=0.002,
    templates={"m": True},
    trials=(Trial(model="m", texts=(" Paris.", " Paris."), tokens=3, seconds=0.1),),
)
UNREADY = {"worker_id": "w-2", "model": "m", "state": "dead", "cause": "was killed by SIGKILL"}
LOW = {'commutator_cached_tokens_total{model="m"} 60000': None}
LOW_LINE = 'commutator_cached_tokens_total{model="m"} 2000'


def with_metrics(*lines: str, **changed: Any) -> dict[str, Any]:
    """Lines replace those of the same name and labels, or are added."""
    page = {line.rpartition(" ")[0]: line for line in PAGE.splitlines()}
    page |= {line.rpartition(" ")[0]: line for line in lines}
    return {"metrics": Metrics.parse("\n".join(page.values())), **changed}


def without(*names: str) -> str:
    return "\n".join(line for line in PAGE.splitlines() if not line.startswith(names))


def health(**changed: Any) -> dict[str, Any]:
    return {"health": {**HEALTH, **changed}}


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("no-answer", {"problem": "connection refused", "health": {}, "metrics": Metrics({})}, "ref"),
    ("not-allowed", {"closed": "answered 403: no", "health": {}, "metrics": Metrics({})}, "403"),
    ("door-drains", health(status="draining"), "draining"),
    ("model-not-ready", with_metrics('commutator_model_ready{model="m"} 0'), "ready, ready"),
    ("worker-fails", health(unready_workers=[UNREADY]), "SIGKILL"),
    (
        "worker-fails",
        health(unready_workers=[{**UNREADY, "state": "failing", "failures": 4}]),
        "4 starts failed",
    ),
    ("worker-starts", health(unready_workers=[{**UNREADY, "state": "starting"}]), "starting"),
    (
        "worker-unreachable",
        health(workers=[WORKERS[0], {**WORKERS[1], "state": "unreachable", "host": "h2"}]),
        "on host h2",
    ),
    (
        "all-drain",
        health(workers=[{**one, "state": "draining"} for one in WORKERS]),
        "draining",
    ),
    ("registry-old", health(registry_age_s=40.0), "40 s old"),
    ("door-says", health(problems=["tier dram of w-0 is down"]), "dram"),
    ("handovers-refused", health(refused_handovers=["w-0 to w-1: block sizes"]), "block sizes"),
    (
        "errors",
        with_metrics('commutator_requests_total{code="503",endpoint="/v1/x",model="m"} 50'),
        "50 x 503 of 150",
    ),
    (
        "rejections",
        with_metrics('commutator_requests_rejected_total{model="m",reason="queue_full"} 30'),
        "30 x queue_full",
    ),
    (
        "connections-dropped",
        with_metrics('commutator_connections_dropped_total{reason="no_descriptors"} 3'),
        "3 x no_descriptors",
    ),
    ("slow-front-door", {"answer_s": 1.5}, "1.50 s"),
    (
        "slow-queue",
        with_metrics('commutator_router_queue_seconds_sum{model="m"} 15'),
        "75% of 0.200 s",
    ),
    (
        "slow-prefill",
        with_metrics('commutator_time_to_first_token_seconds_sum{model="m"} 400'),
        "400 tokens computed",
    ),
    (
        "slow-decision",
        with_metrics('commutator_router_decision_seconds_sum{model="m"} 5'),
        "50 ms",
    ),
    ("slow-doors-queue", with_metrics("commutator_queued_requests 7"), "7 wait"),
    (
        "slow-prefill-queue",
        with_metrics('commutator_prefill_queue_age_seconds{model="m"} 4.5'),
        "4.5 s",
    ),
    (
        "load-uneven",
        with_metrics(
            'commutator_worker_active_requests{model="m",role="both",worker="w-0"} 40',
            'commutator_worker_active_requests{model="m",role="both",worker="w-1"} 0',
            'commutator_worker_active_requests{model="m",role="both",worker="w-2"} 0',
        ),
        "w-0 has 40",
    ),
    (
        "answers-migrate",
        with_metrics('commutator_migrations_total{model="m",reason="lost"} 5'),
        "5 x lost",
    ),
    (
        "handovers-fail",
        with_metrics('commutator_handover_legs_total{leg="decode",model="m",outcome="failed"} 9'),
        "9 failed of 9",
    ),
    ("policy-fails", with_metrics('commutator_router_fallbacks_total{model="m"} 2'), "2 requests"),
    (
        "tokenizer-differs",
        with_metrics('commutator_tokenizer_differences_total{model="m"} 1'),
        "1 times",
    ),
    (
        "blocks-corrupt",
        with_metrics(
            'commutator_kv_failed_verification_total{tier="nvme",when="load",worker="w-0"} 2'
        ),
        "2 blocks",
    ),
    (
        "engines-differ",
        health(workers=[WORKERS[0], {**WORKERS[1], "version": "0.31.0"}]),
        "vllm 0.31.0, vllm 0.32.0",
    ),
    ("no-chat-template", {"templates": {"m": False}}, "no chat template"),
    ("request-fails", {"trials": (Trial(model="m", problem="answered 503: x"),)}, "503"),
    ("answers-differ", {"trials": (Trial(model="m", texts=("a b", "a c")),)}, '"a c"'),
    ("answer-degenerate", {"trials": (Trial(model="m", texts=("x " * 12,) * 2),)}, "x x x"),
    ("answer-degenerate", {"trials": (Trial(model="m", texts=(" ", " ")),)}, '" "'),
    (
        "router-blind",
        {
            "metrics": Metrics.parse(
                without("commutator_router", "commutator_cached") + "\n" + LOW_LINE
            )
        },
        "2 workers",
    ),
    (
        "hits-given-up",
        with_metrics(
            LOW_LINE,
            'commutator_router_overlap_blocks_total{model="m"} 100',
            'commutator_router_given_up_blocks_total{model="m"} 900',
        ),
        "900 blocks",
    ),
    ("index-wrong", with_metrics(LOW_LINE), "60800 tokens were thought to be cached, 2000"),
    (
        "events-lost",
        with_metrics('commutator_router_event_messages_lost_total{worker="w-1"} 12'),
        "12 messages",
    ),
    (
        "evictions",
        with_metrics(
            LOW_LINE,
            'commutator_router_overlap_blocks_total{model="m"} 100',
            'commutator_kv_stored_total{source="device",tier="dram",worker="w-0"} 1000',
            'commutator_kv_removed_total{reason="evicted",tier="dram",worker="w-0"} 900',
        ),
        "900 of 1000",
    ),
    ("tier-down", with_metrics('commutator_kv_tier_up{tier="dram",worker="w-0"} 0'), "down"),
    (
        "tier-not-read",
        with_metrics(
            'commutator_kv_not_loaded_total{reason="slower than recompute",tier="s3",worker="w"} 90'
        ),
        "90 x slower than recompute; 0 were loaded",
    ),
    (
        "prompts-short",
        with_metrics(
            LOW_LINE,
            'commutator_router_overlap_blocks_total{model="m"} 100',
            'commutator_input_sequence_tokens_sum{model="m"} 2000',
        ),
        "20 tokens in the mean, blocks of 16",
    ),
    (
        "groups-resume-rarely",
        with_metrics(
            LOW_LINE,
            'commutator_router_overlap_blocks_total{model="m"} 100',
            resumes_anywhere={"m": False},
        ),
        "states or windows",
    ),
    (
        "hit-rate-low",
        with_metrics(LOW_LINE, 'commutator_router_overlap_blocks_total{model="m"} 100'),
        "2.0% of 100000",
    ),
]


def test_a_healthy_deployment_has_no_finding() -> None:
    assert DEPLOYMENT.findings(HEALTHY) == []
    assert DEPLOYMENT.findings(Deployment(url="http://h")) == []


@pytest.mark.parametrize(
    ("code", "changed", "part"), FAULTS, ids=[f"{code}-{n}" for n, (code, *_) in enumerate(FAULTS)]
)
def test_a_planted_fault_is_found_and_nothing_else(
    code: str, changed: dict[str, Any], part: str
) -> None:
    found = DEPLOYMENT.findings(evolve(HEALTHY, **changed))
    # A cause of a low hit rate stands beside the low hit rate itself.
    assert {one.code for one in found} - {code, "hit-rate-low"} == set()
    assert part in next(one.text for one in found if one.code == code)


def test_every_check_has_its_planted_fault() -> None:
    assert sorted({one.code for one in DEPLOYMENT.checks}) == sorted({code for code, *_ in FAULTS})


def test_of_few_requests_no_rate_is_said() -> None:
    few = PAGE.replace('_count{model="m"} 100', '_count{model="m"} 5') + LOW_LINE
    assert DEPLOYMENT.findings(evolve(HEALTHY, metrics=Metrics.parse(few))) == []


def test_counters_count_since_the_earlier_page_and_front_doors_are_added_up() -> None:
    earlier = Metrics.parse('commutator_x_total{frontend="0"} 5\ncommutator_y 3')
    later = Metrics.parse(
        'commutator_x_total{frontend="0"} 9\ncommutator_x_total{frontend="1"} 2\ncommutator_y 4'
    )
    since = later.since(earlier)
    assert (since.sum("x_total"), since.sum("y")) == (6, 4)


def test_figures_leave_out_what_is_not_known() -> None:
    assert figures(HEALTHY)["hit_rate"] == 0.6
    assert "itl_mean_s" not in figures(HEALTHY)


def test_quantiles_are_ends_of_buckets() -> None:
    page = "\n".join(
        f'commutator_h_bucket{{le="{end}"}} {count}'
        for end, count in (("0.1", 50), ("0.5", 96), ("+Inf", 100))
    )
    assert Metrics.parse(page).quantile("h", 0.95) == 0.5
    assert Metrics.parse("").quantile("h", 0.95) is None

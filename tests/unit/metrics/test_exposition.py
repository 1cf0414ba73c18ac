"""What Prometheus scrapes after one of everything: names, order, labels, help and types are kept.

`exposition.txt` is the text; dashboards, alerts and queries of others are written for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

from attrs import evolve
from tests.unit.metrics.test_kv_metrics import STATISTICS
from tests.unit.metrics.test_observed import HANDOVER, REQUEST
from tests.unit.metrics.test_router_metrics import EVENTS

from commutator.contract.disagg import DisaggAnswer
from commutator.contract.request import FinishReason, RequestOutcome
from commutator.contract.routing import Overlap
from commutator.contract.worker import (
    ExportStatistics,
    PullStatistics,
    Role,
    TransferStatistics,
)
from commutator.metrics.families import FAMILIES
from commutator.metrics.frontend import FrontendMetrics
from commutator.metrics.readings import Readings
from commutator.routing.disagg.prefill_pool import QueueState
from commutator.routing.prefix_index.health import Cause, EventWarning
from commutator.routing.router import FALLBACK, Route
from commutator.routing.workers import WorkerStatus

RECORDED = Path(__file__).with_name("exposition.txt")

TRANSFERS = TransferStatistics(
    exports=ExportStatistics(active=1, held_blocks=2, released=3, failed=4, lapsed=5),
    pulls=PullStatistics(
        succeeded=6, failed=7, dropped=8, pulled_bytes=9, nixl_bytes=10, pull_s=0.5
    ),
)
PLANNER = {
    "mode": "act",
    "tick_s": 0.01,
    "plans": 3,
    "actions": {"start": 2},
    "last": {
        "roles": {
            "both": {
                "desired": 3,
                "proposed": 4,
                "ready": 2,
                "starting": 1,
                "draining": 0,
                "samples": 9,
                "residual": None,
            }
        },
        "observed": {"attained_ttft": 0.9, "attained_itl": None, "waiting_requests": 5},
        "warnings": ["one"],
    },
    "tuning": {
        "options": {"router.overlap_weight": 1.5},
        "trial": {"share": 0.5},
        "arms": [
            {"ended": 1, "missed": 2, "failed": 3},
            {"ended": 4, "missed": 5, "failed": 6},
        ],
        "steps": {"tried": 1},
    },
}


def counted() -> FrontendMetrics:
    """One of everything that a front door counts."""
    worker = WorkerStatus("w-0", "m", "sim", "ready", 1, 3, role=Role.PREFILL)
    metrics = FrontendMetrics(
        Readings(
            running=lambda: 1,
            queued=lambda: 2,
            load_peers=lambda: 3,
            registry_age_s=lambda: 0.5,
            models_ready=lambda: {"m": True, "n": False},
            workers=lambda: [worker],
            router_queues=lambda: {"m": 4},
            prefill_queues=lambda: {"m": QueueState(requests=5, oldest_s=1.5)},
            prompt_cache_bytes=lambda: {"m": 6},
            events=lambda: {"w-0": EVENTS},
            kv=lambda: {"w-0": STATISTICS},
            transfers=lambda: {"w-0": TRANSFERS},
            refused=lambda: {"w-0": {"token_api": 7}},
            warnings=lambda: [EventWarning("w-0", Cause.LOST, "...")],
            planner=lambda: PLANNER,
        )
    )
    metrics.model_served("m")
    metrics.request_queued(REQUEST, "router", 2.0)
    metrics.request_queued(REQUEST, "prefill", 3.0)
    metrics.disagg_decided(REQUEST, DisaggAnswer(separate=True, reason="long"))
    metrics.kv_handed_over(REQUEST, HANDOVER)
    metrics.kv_handed_over(REQUEST, evolve(HANDOVER, decode=None, handover_s=None, cancel_s=0.25))
    metrics.request_migrated(REQUEST, "d", "e", "lost", 1)
    outcome = RequestOutcome(
        worker_id="w-0",
        finish_reason=FinishReason.STOP,
        generated_tokens=4,
        cached_tokens=16,
        recomputed_tokens=8,
        duration_s=0.3,
    )
    metrics.request_finished(REQUEST, outcome)
    metrics.request_rejected("m", "full")
    metrics.connection_dropped("full")
    metrics.request_done("chat", "m", 200, 0.3)
    metrics.principal_usage.add(("p",), 1, 3, 2, 1)
    metrics.principal_refused("p", "requests_per_minute")
    metrics.principal_refused("q", "requests_per_minute")
    route = SimpleNamespace(
        routing_s=0.0003,
        sequence_hashes=(1, 2),
        candidate=SimpleNamespace(overlap=Overlap(device=1)),
        given_up_blocks=1,
        decision=SimpleNamespace(policy=FALLBACK),
    )
    metrics.routed("m", cast(Route, route))
    metrics.tokens_used("m", 30, 16, 4)
    with patch("time.perf_counter", side_effect=[1.0, 1.5]):
        times = metrics.token_times("m", 0.5)
        times.tokens(1)
        times.tokens(2)
    metrics.prompt_cache_hits.labels("m").inc(2)
    metrics.tokenizer_differences.labels("m").inc()
    return metrics


def scraped(metrics: FrontendMetrics) -> str:
    """The text, less times of creation and the version."""
    text = re.sub(r"(_created(?:\{.*\})? ).*", r"\1TIME", metrics.render().decode())
    return re.sub(r'version="[^"]*"', 'version="VERSION"', text)


def test_what_is_scraped_is_kept() -> None:
    assert scraped(counted()) == RECORDED.read_text()


def test_every_family_of_the_table_is_counted_or_read() -> None:
    described = {
        line.split()[2]
        for line in scraped(counted()).splitlines()
        if line.startswith("# TYPE ") and not line.split()[2].endswith("_created")
    }
    assert described == {family.name for family in FAMILIES}

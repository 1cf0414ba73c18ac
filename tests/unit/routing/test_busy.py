"""When a worker counts as busy, and how that is told."""

from __future__ import annotations

import pytest

from commutator.config.model import BusyConfig
from commutator.routing.busy import describe_busy, threshold_hit
from commutator.routing.contract import WorkerLoad

ALL = BusyConfig(
    max_active_requests=4,
    active_prefill_tokens_threshold=1000,
    active_decode_blocks_threshold=0.5,
)


@pytest.mark.parametrize(
    ("config", "load", "hit"),
    [
        (ALL, WorkerLoad(3, 1000, 50), None),
        (ALL, WorkerLoad(4, 0, 0), "max_active_requests"),
        (ALL, WorkerLoad(1, 1001, 0), "active_prefill_tokens_threshold"),
        (ALL, WorkerLoad(1, 0, 51), "active_decode_blocks_threshold"),
        (BusyConfig(), WorkerLoad(10**6, 10**6, 10**6), None),
        (BusyConfig(active_prefill_tokens_threshold=0), WorkerLoad(9, 0, 9), None),
        (BusyConfig(active_prefill_tokens_threshold=0), WorkerLoad(1, 1, 1),
         "active_prefill_tokens_threshold"),
    ],
)  # fmt: skip
def test_thresholds(config: BusyConfig, load: WorkerLoad, hit: str | None) -> None:
    assert threshold_hit(config, load, kv_capacity_blocks=100) == hit


def test_an_unknown_capacity_makes_nobody_busy() -> None:
    config = BusyConfig(active_decode_blocks_threshold=0.5)
    assert threshold_hit(config, WorkerLoad(1, 1, 10**6), kv_capacity_blocks=0) is None


def test_an_idle_worker_is_never_busy() -> None:
    strictest = BusyConfig(
        max_active_requests=1,
        active_prefill_tokens_threshold=0,
        active_decode_blocks_threshold=0.001,
    )
    assert threshold_hit(strictest, WorkerLoad(), kv_capacity_blocks=1) is None


def test_description() -> None:
    hits = ["max_active_requests", "active_decode_blocks_threshold", "max_active_requests"]
    assert describe_busy(ALL, hits) == (
        "3 workers are busy (2 by max_active_requests=4, 1 by active_decode_blocks_threshold=0.5)"
    )
    assert describe_busy(ALL, hits[:1]) == "1 worker is busy (1 by max_active_requests=4)"


def test_a_queue_option_without_any_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="max_queue_s: without effect"):
        BusyConfig(max_queue_s=3.0)
    with pytest.raises(ValueError, match="max_queued_requests: without effect"):
        BusyConfig(max_queued_requests=3)

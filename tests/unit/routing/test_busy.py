"""When a worker counts as busy, and how that is reported."""

from __future__ import annotations

import pytest

from commutator.contract.routing import BusyConfig, WorkerLoad
from commutator.routing.load import threshold_hit
from commutator.routing.router import describe_busy

ALL = BusyConfig(
    max_active_requests=4,
    active_prefill_tokens_threshold=1000,
    active_decode_blocks_threshold=0.5,
)


def load(requests: int, prefill_tokens: int, decode_blocks: int) -> WorkerLoad:
    return WorkerLoad(
        active_requests=requests,
        active_prefill_tokens=prefill_tokens,
        active_decode_blocks=decode_blocks,
    )


@pytest.mark.parametrize(
    ("config", "worker_load", "hit"),
    [
        (ALL, load(3, 1000, 50), None),
        (ALL, load(4, 0, 0), "max_active_requests"),
        (ALL, load(1, 1001, 0), "active_prefill_tokens_threshold"),
        (ALL, load(1, 0, 51), "active_decode_blocks_threshold"),
        (BusyConfig(), load(10**6, 10**6, 10**6), None),
        (BusyConfig(active_prefill_tokens_threshold=0), load(9, 0, 9), None),
        (BusyConfig(active_prefill_tokens_threshold=0), load(1, 1, 1),
         "active_prefill_tokens_threshold"),
    ],
)  # fmt: skip
def test_thresholds(config: BusyConfig, worker_load: WorkerLoad, hit: str | None) -> None:
    assert threshold_hit(config, worker_load, kv_capacity_blocks=100) == hit


def test_a_worker_of_unknown_capacity_is_never_busy() -> None:
    config = BusyConfig(active_decode_blocks_threshold=0.5)
    assert (
        threshold_hit(
            config,
            load(1, 1, 10**6),
            kv_capacity_blocks=0,
        )
        is None
    )


def test_an_idle_worker_is_never_busy() -> None:
    strictest = BusyConfig(
        max_active_requests=1,
        active_prefill_tokens_threshold=0,
        active_decode_blocks_threshold=0.001,
    )
    assert threshold_hit(strictest, WorkerLoad(), kv_capacity_blocks=1) is None


def test_description() -> None:
    hits = {"max_active_requests": 2, "active_decode_blocks_threshold": 1}
    assert describe_busy(ALL, hits) == (
        "3 workers are busy (2 by max_active_requests=4, 1 by active_decode_blocks_threshold=0.5)"
    )
    one = {"max_active_requests": 1}
    assert describe_busy(ALL, one) == "1 worker is busy (1 by max_active_requests=4)"


def test_a_queue_option_without_any_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="max_queue_s: without effect"):
        BusyConfig(max_queue_s=3.0)
    with pytest.raises(ValueError, match="max_queued_requests: without effect"):
        BusyConfig(max_queued_requests=3)

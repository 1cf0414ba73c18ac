"""What the workers count of their hand-overs, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from commutator.engine.handover import HandoverStatistics

__all__ = ["WorkerHandoverCollector"]


class WorkerHandoverCollector(Collector):
    """``source`` gives each worker's counters, by worker id, as they were heard last."""

    def __init__(self) -> None:
        self.source: Callable[[], Mapping[str, HandoverStatistics]] = dict

    def collect(self) -> Iterable[Metric]:
        return _families(self.source())

    def describe(self) -> Iterable[Metric]:
        return _families({})


def _families(statistics: Mapping[str, HandoverStatistics]) -> list[Metric]:
    held = GaugeMetricFamily(
        "commutator_worker_handover_held_blocks",
        "Blocks that a prefill worker holds for decode workers.",
        labels=("worker",),
    )
    exports = CounterMetricFamily(
        "commutator_worker_handover_exports",
        "Hand-overs of a prefill worker by how they ended: released by the decode worker, "
        "failed, or lapsed because nobody asked for so long.",
        labels=("worker", "outcome"),
    )
    pulls = CounterMetricFamily(
        "commutator_worker_handover_pulls",
        "Hand-overs of a decode worker by how they ended; dropped: aborted, or not needed.",
        labels=("worker", "outcome"),
    )
    pulled = CounterMetricFamily(
        "commutator_worker_handover_pulled_bytes",
        "KV bytes that a decode worker read and verified.",
        labels=("worker",),
    )
    moved = CounterMetricFamily(
        "commutator_worker_handover_nixl_bytes",
        "KV bytes that a decode worker read, by NIXL's own telemetry.",
        labels=("worker",),
    )
    seconds = CounterMetricFamily(
        "commutator_worker_handover_pull_seconds",
        "Time that a decode worker's requests spent reading, waits for prefill included.",
        labels=("worker",),
    )
    for worker, counted in statistics.items():
        held.add_metric((worker,), counted.exports.held_blocks)
        for outcome in ("released", "failed", "lapsed"):
            exports.add_metric((worker, outcome), getattr(counted.exports, outcome))
        for outcome in ("succeeded", "failed", "dropped"):
            pulls.add_metric((worker, outcome), getattr(counted.pulls, outcome))
        pulled.add_metric((worker,), counted.pulls.pulled_bytes)
        moved.add_metric((worker,), counted.pulls.nixl_bytes)
        seconds.add_metric((worker,), counted.pulls.pull_s)
    return [held, exports, pulls, pulled, moved, seconds]

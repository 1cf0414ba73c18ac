"""What the workers count of their storage tiers, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from commutator.kv.tier import UNBOUNDED

if TYPE_CHECKING:
    from commutator.kv.counters import EdgeStatistics, KvStatistics, TierState

__all__ = ["KvCollector"]

_SOURCE_CORRUPT = "corrupt at its source"
_VERIFY_CORRUPT = "found corrupt by verify"


class KvCollector(Collector):
    """``source`` gives each worker's counters, by worker id, as they were heard last."""

    def __init__(self) -> None:
        self.source: Callable[[], Mapping[str, KvStatistics]] = dict

    def collect(self) -> Iterable[Metric]:
        families = _Families()
        for worker, statistics in self.source().items():
            for tier in statistics.tiers:
                families.add_tier(worker, tier)
            for edge in statistics.edges:
                families.add_edge(worker, edge)
        return families.all

    def describe(self) -> Iterable[Metric]:
        return _Families().all


class _Families:
    """The metrics of one scrape."""

    def __init__(self) -> None:
        tier, edge = ("worker", "tier"), ("worker", "source", "tier")
        self.up = GaugeMetricFamily(
            "commutator_kv_tier_up", "1 while the tier can be used, 0 otherwise.", labels=tier
        )
        self.blocks = GaugeMetricFamily(
            "commutator_kv_blocks",
            "KV blocks in a tier by state; loading and retained ones are published, too.",
            labels=(*tier, "state"),
        )
        self.capacity = GaugeMetricFamily(
            "commutator_kv_capacity_blocks", "Blocks that fit into a bounded tier.", labels=tier
        )
        self.latency = GaugeMetricFamily(
            "commutator_kv_load_latency_seconds", "Of a load from a tier, as measured.", labels=tier
        )
        self.block_s = GaugeMetricFamily(
            "commutator_kv_load_block_seconds",
            "What each block adds to a load, as measured.",
            labels=tier,
        )
        self.loads = CounterMetricFamily(
            "commutator_kv_loads",
            "Blocks asked of a tier; only the outcome loaded was used.",
            labels=(*tier, "outcome"),
        )
        self.not_loaded = CounterMetricFamily(
            "commutator_kv_not_loaded",
            "Blocks that a tier had and that were computed instead.",
            labels=(*tier, "reason"),
        )
        self.removed = CounterMetricFamily(
            "commutator_kv_removed", "Blocks that left a tier.", labels=(*tier, "reason")
        )
        self.prefetched = CounterMetricFamily(
            "commutator_kv_prefetched",
            "Blocks brought up from a slower tier before they were asked for; of these the ones "
            "used since, and those that left unused.",
            labels=(*tier, "outcome"),
        )
        self.corrupt = CounterMetricFamily(
            "commutator_kv_failed_verification",
            "Blocks whose checksum was wrong: when loaded, moved to another tier, or by kv verify.",
            labels=(*tier, "when"),
        )
        self.stored = CounterMetricFamily(
            "commutator_kv_stored", "Blocks that came into a tier.", labels=edge
        )
        self.not_admitted = CounterMetricFamily(
            "commutator_kv_not_admitted",
            "Blocks offered to a tier that it did not take.",
            labels=(*edge, "reason"),
        )
        self.store_failed = CounterMetricFamily(
            "commutator_kv_store_failed",
            "Blocks that a tier took and that could not be stored.",
            labels=(*edge, "reason"),
        )

    @property
    def all(self) -> list[Metric]:
        return [family for family in vars(self).values() if isinstance(family, Metric)]

    def add_tier(self, worker: str, tier: TierState) -> None:
        labels = (worker, tier.name)
        self.up.add_metric(labels, float(tier.up))
        for state in ("published", "staged", "leaving", "waiting", "loading", "retained"):
            self.blocks.add_metric((*labels, state), getattr(tier, state))
        if tier.capacity < UNBOUNDED:
            self.capacity.add_metric(labels, tier.capacity)
        if tier.latency_s is not None and tier.block_s is not None:
            self.latency.add_metric(labels, tier.latency_s)
            self.block_s.add_metric(labels, tier.block_s)
        _add_all(self.loads, labels, tier.loads)
        _add_all(self.not_loaded, labels, tier.not_loaded)
        _add_all(self.removed, labels, tier.removed)
        _add_all(self.prefetched, labels, tier.prefetched)
        self.corrupt.add_metric((*labels, "load"), tier.loads.get("corrupt", 0))
        self.corrupt.add_metric((*labels, "verify"), tier.removed.get(_VERIFY_CORRUPT, 0))

    def add_edge(self, worker: str, edge: EdgeStatistics) -> None:
        labels = (worker, edge.source, edge.target)
        self.stored.add_metric(labels, edge.stored)
        _add_all(self.not_admitted, labels, edge.not_admitted)
        _add_all(self.store_failed, labels, edge.failed)
        if _SOURCE_CORRUPT in edge.failed:
            self.corrupt.add_metric((worker, edge.source, "move"), edge.failed[_SOURCE_CORRUPT])


def _add_all(
    family: CounterMetricFamily, labels: tuple[str, ...], counts: Mapping[str, int]
) -> None:
    for reason, blocks in counts.items():
        family.add_metric((*labels, reason), blocks)

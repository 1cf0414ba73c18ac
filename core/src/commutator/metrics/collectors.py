"""Metrics that are read at each scrape: gauges, and what workers and routing count themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from commutator.contract.block import CacheLevel
from commutator.contract.tier import UNBOUNDED
from commutator.contract.worker import EdgeStatistics, KvStatistics, TierState, TransferStatistics
from commutator.routing.prefix_index.health import EventWarning
from commutator.routing.prefix_index.indexer import WorkerEvents
from commutator.routing.workers import WorkerStatus

__all__ = [
    "AtScrape",
    "event_metrics",
    "gauge",
    "gauge_by_model",
    "kv_metrics",
    "planner_metrics",
    "refusal_metrics",
    "transfer_metrics",
    "version_metrics",
    "warning_metrics",
    "worker_metrics",
]

T = TypeVar("T")

_SOURCE_CORRUPT = "corrupt at its source"
_VERIFY_CORRUPT = "found corrupt by verify"


class AtScrape(Collector, Generic[T]):
    """At each scrape, the metrics that ``build`` makes of what ``read`` returns then."""

    def __init__(
        self, read: Callable[[], Iterable[T]], build: Callable[[Iterable[T]], Iterable[Metric]]
    ) -> None:
        """``build`` returns the same metrics for every input, without samples for an empty one."""
        self._read = read
        self._build = build

    def collect(self) -> Iterable[Metric]:
        return self._build(self._read())

    def describe(self) -> Iterable[Metric]:
        return self._build(())


def gauge(name: str, documentation: str, read: Callable[[], float]) -> Collector:
    """One gauge without labels, read at each scrape."""
    return _gauge(name, documentation, (), lambda: [((), read())])


def gauge_by_model(
    name: str, documentation: str, read: Callable[[], Mapping[str, float]]
) -> Collector:
    """One gauge with a value for each model, read at each scrape."""
    labels = ("model",)
    return _gauge(name, documentation, labels, lambda: [((m,), v) for m, v in read().items()])


def _gauge(
    name: str,
    documentation: str,
    labels: Sequence[str],
    read: Callable[[], Iterable[tuple[Sequence[str], float]]],
) -> Collector:
    def build(samples: Iterable[tuple[Sequence[str], float]]) -> Iterable[Metric]:
        family = GaugeMetricFamily(name, documentation, labels=labels)
        for values, value in samples:
            family.add_metric(values, value)
        return [family]

    return AtScrape(read, build)


def kv_metrics(statistics: Iterable[tuple[str, KvStatistics]]) -> Iterable[Metric]:
    """What each worker, by its id, counts of its storage tiers."""
    families = _Families()
    for worker, counted in statistics:
        for tier in counted.tiers:
            families.add_tier(worker, tier)
        for edge in counted.edges:
            families.add_edge(worker, edge)
    return families.all


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
            "commutator_kv_load_latency_seconds",
            "Measured time of a load from a tier, beside that of its blocks.",
            labels=tier,
        )
        self.block_s = GaugeMetricFamily(
            "commutator_kv_load_block_seconds",
            "What each block adds to a load, as measured.",
            labels=tier,
        )
        self.loads = CounterMetricFamily(
            "commutator_kv_loads",
            "Blocks requested from a tier, by outcome; only `loaded` ones were used.",
            labels=(*tier, "outcome"),
        )
        self.not_loaded = CounterMetricFamily(
            "commutator_kv_not_loaded",
            "Blocks that a tier had and that were computed instead of loaded, by reason.",
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
            "commutator_kv_stored", "Blocks stored in a tier.", labels=edge
        )
        self.not_admitted = CounterMetricFamily(
            "commutator_kv_not_admitted",
            "Blocks offered to a tier that it did not take.",
            labels=(*edge, "reason"),
        )
        self.store_failed = CounterMetricFamily(
            "commutator_kv_store_failed",
            "Blocks that a tier accepted and failed to store.",
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
        _add_all(self.not_loaded, labels, {**_NOT_LOADED, **tier.not_loaded})
        _add_all(self.removed, labels, tier.removed)
        _add_all(self.prefetched, labels, {**_PREFETCHED, **tier.prefetched})
        self.corrupt.add_metric((*labels, "load"), tier.loads.get("corrupt", 0))
        self.corrupt.add_metric((*labels, "verify"), tier.removed.get(_VERIFY_CORRUPT, 0))

    def add_edge(self, worker: str, edge: EdgeStatistics) -> None:
        labels = (worker, edge.source, edge.target)
        self.stored.add_metric(labels, edge.stored)
        _add_all(self.not_admitted, labels, edge.not_admitted)
        _add_all(self.store_failed, labels, {**_STORE_FAILED, **edge.failed})
        if _SOURCE_CORRUPT in edge.failed:
            self.corrupt.add_metric((worker, edge.source, "move"), edge.failed[_SOURCE_CORRUPT])


# Zeros before the first of them: a rate does not see a series begin at 1.
_NOT_LOADED = {"slower than recompute": 0, "tier is down": 0}
_PREFETCHED = {"brought": 0, "used": 0, "unused": 0}
_STORE_FAILED = {"write failed": 0, "not committed": 0, "no free slot": 0, "tier is down": 0}


def _add_all(
    family: CounterMetricFamily, labels: tuple[str, ...], counts: Mapping[str, int]
) -> None:
    for reason, blocks in counts.items():
        family.add_metric((*labels, reason), blocks)


def version_metrics(versions: Iterable[str]) -> Iterable[Metric]:
    """Which version of Commutator the front door runs."""
    family = GaugeMetricFamily(
        "commutator_build_info", "Always 1; the label is the version.", labels=("version",)
    )
    for version in versions:
        family.add_metric((version,), 1)
    return [family]


def worker_metrics(statuses: Iterable[WorkerStatus]) -> Iterable[Metric]:
    """The workers that the front door knows."""
    states = GaugeMetricFamily(
        "commutator_worker_state",
        "1 for the state that a worker is in: ready, draining or unreachable. A worker whose lease "
        "lapsed has none.",
        labels=("worker", "model", "role", "state"),
    )
    active = GaugeMetricFamily(
        "commutator_worker_active_requests",
        "Requests in flight at a worker, from all front doors that share their load.",
        labels=("worker", "model", "role"),
    )
    for status in statuses:
        labels = (status.worker_id, status.model, status.role.value)
        states.add_metric((*labels, status.state), 1)
        active.add_metric(labels, status.active_requests_of_all)
    return [states, active]


_OF_SOURCES = {
    "lost": (
        "messages_lost",
        "KV event messages of a worker that are lost: no replay recovered them.",
    ),
    "gaps": ("gaps", "Gaps in the numbers of a worker's messages."),
    "replays": ("replays", "Replays requested from a worker; some are regular checks."),
    "replays_failed": ("replays_failed", "Replays that were not answered, or not to the end."),
    "resyncs": (
        "resyncs",
        "Times that a worker's blocks left the prefix index because messages were lost.",
    ),
    "restarts": (
        "engine_restarts",
        "Times that a worker's messages began anew: its engine restarted.",
    ),
    "interruptions": (
        "interruptions",
        "Times that the subscription broke, or dropped messages because they were read too slowly.",
    ),
}
"""By field of ``SequenceCounters``: the end of the metric's name, and its meaning."""


def warning_metrics(warnings: Iterable[EventWarning]) -> Iterable[Metric]:
    """Why the prefix index may be wrong about a worker now."""
    present = GaugeMetricFamily(
        "commutator_router_event_warnings",
        "1 while this makes what is known of a worker's cache incomplete or wrong; /health says "
        "it in words.",
        labels=("worker", "cause"),
    )
    for worker, cause in sorted({(warning.worker_id, warning.cause) for warning in warnings}):
        present.add_metric((worker, cause), 1)
    return [present]


def event_metrics(statistics: Iterable[tuple[str, WorkerEvents]]) -> Iterable[Metric]:
    """What came of each worker's KV events, by its id."""
    indexed = GaugeMetricFamily(
        "commutator_router_indexed_blocks",
        "KV blocks that a worker is known, or guessed, to hold, in the router's block size.",
        labels=("worker", "tier"),
    )
    messages = _counter("messages", "KV event messages of a worker that were understood.")
    undecodable = _counter(
        "messages_undecodable", "Messages of a worker that could not be read as KV events."
    )
    of_sources = {field: _counter(*about) for field, about in _OF_SOURCES.items()}
    for worker, events in statistics:
        for tier, blocks in zip(CacheLevel, events.blocks, strict=True):
            indexed.add_metric((worker, tier.name.lower()), blocks)
        messages.add_metric((worker,), events.messages)
        undecodable.add_metric((worker,), events.decode_errors)
        for field, family in of_sources.items():
            total = sum(getattr(source, field) for source in events.sources)
            family.add_metric((worker,), total)
    return [indexed, messages, undecodable, *of_sources.values()]


def _counter(name: str, meaning: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"commutator_router_event_{name}", meaning, labels=("worker",))


def refusal_metrics(refused: Iterable[tuple[str, Mapping[str, int]]]) -> Iterable[Metric]:
    """Connections that processes refused: (worker id or "supervisor", count by service)."""
    family = CounterMetricFamily(
        "commutator_refused_connections",
        "Connections refused because the other process did not prove that it belongs to this "
        "deployment.",
        labels=("process", "service"),
    )
    for process, counts in refused:
        for service, count in counts.items():
            family.add_metric((process, service), count)
    return [family]


def transfer_metrics(statistics: Iterable[tuple[str, TransferStatistics]]) -> Iterable[Metric]:
    """What each worker, by its id, counts of its KV transfers."""
    held = GaugeMetricFamily(
        "commutator_worker_handover_held_blocks",
        "Blocks that a prefill worker holds for decode workers.",
        labels=("worker",),
    )
    exports = CounterMetricFamily(
        "commutator_worker_handover_exports",
        "Hand-overs of a prefill worker by how they ended: released by the decode worker, "
        "failed, or lapsed because no decode worker asked in time.",
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
    for worker, counted in statistics:
        held.add_metric((worker,), counted.exports.held_blocks)
        for outcome in ("released", "failed", "lapsed"):
            exports.add_metric((worker, outcome), getattr(counted.exports, outcome))
        for outcome in ("succeeded", "failed", "dropped"):
            pulls.add_metric((worker, outcome), getattr(counted.pulls, outcome))
        pulled.add_metric((worker,), counted.pulls.pulled_bytes)
        moved.add_metric((worker,), counted.pulls.nixl_bytes)
        seconds.add_metric((worker,), counted.pulls.pull_s)
    return [held, exports, pulls, pulled, moved, seconds]


def planner_metrics(statuses: Iterable[Mapping[str, Any]]) -> Iterable[Metric]:
    """What the planner tells of itself; see ``LivePlanner.status``."""
    role = ("role",)
    by_role = {
        name: GaugeMetricFamily(f"commutator_planner_{name}_workers", documentation, labels=role)
        for name, documentation in (
            ("desired", "Workers that the plan wants, within bounds, budget and holds."),
            ("proposed", "Workers that the demand needs, as the planner's policy computes."),
            ("ready", "Workers that get requests."),
            ("starting", "Workers that were started and are not ready."),
            ("draining", "Workers that get no more requests."),
        )
    }
    by_role["samples"] = GaugeMetricFamily(
        "commutator_planner_speed_samples",
        "Measured times that the planner's idea of a worker's speed rests on.",
        labels=role,
    )
    by_role["residual"] = GaugeMetricFamily(
        "commutator_planner_speed_residual_ratio",
        "How far measured times are from that speed: 0.1 is 10 %; absent while too few are known.",
        labels=role,
    )
    attained = GaugeMetricFamily(
        "commutator_planner_attained_ratio",
        "The part of the last interval's requests that met a target; absent without any.",
        labels=("target",),
    )
    waits = GaugeMetricFamily(
        "commutator_planner_waiting_requests", "Requests of all front doors without a worker."
    )
    acts = GaugeMetricFamily(
        "commutator_planner_acts", "1 in the mode act, 0 where the planner only advises."
    )
    tick = GaugeMetricFamily(
        "commutator_planner_tick_seconds", "How long the last plan took to make."
    )
    plans = CounterMetricFamily("commutator_planner_plans", "Plans made.")
    actions = CounterMetricFamily(
        "commutator_planner_actions", "What was done to workers.", labels=("kind",)
    )
    warnings = GaugeMetricFamily("commutator_planner_warnings", "Warnings of the last plan.")
    statuses = list(statuses)
    for status in statuses:
        last = status["last"]
        if last is None:
            continue
        for name, one in last["roles"].items():
            for field, family in by_role.items():
                if one[field] is not None:
                    family.add_metric((name,), one[field])
        for target in ("ttft", "itl"):
            if (value := last["observed"][f"attained_{target}"]) is not None:
                attained.add_metric((target,), value)
        waiting = last["observed"]["waiting_requests"]
        if waiting is not None:
            waits.add_metric((), waiting)
        acts.add_metric((), status["mode"] == "act")
        tick.add_metric((), status["tick_s"])
        plans.add_metric((), status["plans"])
        for kind, number in status["actions"].items():
            actions.add_metric((kind,), number)
        warnings.add_metric((), len(last["warnings"]))
    families = [*by_role.values(), attained, waits, acts, tick, plans, actions, warnings]
    return [*families, *_tuning_metrics(filter(None, (one.get("tuning") for one in statuses)))]


def _tuning_metrics(statuses: Iterable[Mapping[str, Any]]) -> Iterable[Metric]:
    """See ``LiveTuning.status``."""
    values = GaugeMetricFamily(
        "commutator_planner_tuning_value",
        "The value of each tunable option, for requests in no trial.",
        labels=("option",),
    )
    share = GaugeMetricFamily(
        "commutator_planner_tuning_share_ratio",
        "The part of the requests that get the tried value now: in a switchback all or none.",
    )
    requests = GaugeMetricFamily(
        "commutator_planner_tuning_requests",
        "Requests of the present trial that ended, with the value before and the tried one.",
        labels=("value", "outcome"),
    )
    steps = CounterMetricFamily(
        "commutator_planner_tuning_steps",
        "What tuning did: searched, advised, tried, promoted, settled, rolled_back.",
        labels=("kind",),
    )
    for status in statuses:
        for option, value in status["options"].items():
            values.add_metric((option,), value)
        trial = status["trial"]
        share.add_metric((), 0.0 if trial is None else trial["share"])
        for name, counted in zip(("before", "tried"), status["arms"] or (), strict=False):
            for outcome in ("ended", "missed", "failed"):
                requests.add_metric((name, outcome), counted[outcome])
        for kind, number in status["steps"].items():
            steps.add_metric((kind,), number)
    return [values, share, requests, steps]

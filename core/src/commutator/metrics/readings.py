"""What is read whenever the metrics are scraped, and the samples that are made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from attrs import frozen
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from commutator import __version__
from commutator.contract.block import CacheLevel
from commutator.contract.tier import UNBOUNDED
from commutator.contract.worker import EdgeStatistics, KvStatistics, TierState, TransferStatistics
from commutator.metrics import families
from commutator.metrics.families import Family
from commutator.routing.disagg.prefill_pool import QueueState
from commutator.routing.prefix_index.health import EventWarning
from commutator.routing.prefix_index.indexer import WorkerEvents
from commutator.routing.workers import WorkerStatus

Samples = Iterator[tuple[Family, tuple[str, ...], float]]
"""Each: the values of the family's labels, in order, and the sample's."""

_SOURCE_CORRUPT = "corrupt at its source"
_VERIFY_CORRUPT = "found corrupt by verify"


@frozen(kw_only=True)
class Readings:
    """What is read whenever the metrics are scraped; each function returns the values of now."""

    running: Callable[[], int] = lambda: 0
    """Requests that run."""
    queued: Callable[[], int] = lambda: 0
    """Requests that wait for a place in the front door."""
    load_peers: Callable[[], int] = lambda: 0
    registry_age_s: Callable[[], float] = lambda: 0.0
    """Seconds since the registry confirmed the view of workers."""
    models_ready: Callable[[], Mapping[str, bool]] = dict
    """By model, whether it can be served now."""
    workers: Callable[[], Iterable[WorkerStatus]] = tuple
    router_queues: Callable[[], Mapping[str, int]] = dict
    """By model, requests that wait for a worker."""
    prefill_queues: Callable[[], Mapping[str, QueueState]] = dict
    """By model."""
    prompt_cache_bytes: Callable[[], Mapping[str, int]] = dict
    """By model."""
    events: Callable[[], Mapping[str, WorkerEvents]] = dict
    """By worker id, as the next two."""
    kv: Callable[[], Mapping[str, KvStatistics]] = dict
    transfers: Callable[[], Mapping[str, TransferStatistics]] = dict
    refused: Callable[[], Mapping[str, Mapping[str, int]]] = dict
    """By worker id, or "supervisor", and by service: connections that a process refused."""
    warnings: Callable[[], Iterable[EventWarning]] = tuple
    planner: Callable[[], Mapping[str, Any] | None] = lambda: None
    """What the planner last told of itself, as ``LivePlanner.status``; None without one."""


class AtScrape(Collector):
    """The families that are read, with the samples of each scrape."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterable[Metric]:
        metrics = {family: family.metric() for family in families.FAMILIES if family.is_read}
        for family, labels, value in _samples(self._readings):
            metrics[family].add_metric(labels, value)
        return metrics.values()

    def describe(self) -> Iterable[Metric]:
        return [family.metric() for family in families.FAMILIES if family.is_read]


def _samples(readings: Readings) -> Samples:
    yield from _of_front_door(readings)
    for status in readings.workers():
        labels = (status.worker_id, status.model, status.role.value)
        yield families.WORKER_STATE, (*labels, status.state), 1
        yield families.WORKER_ACTIVE_REQUESTS, labels, status.active_requests_of_all
    for worker, cause in sorted({(one.worker_id, one.cause) for one in readings.warnings()}):
        yield families.EVENT_WARNINGS, (worker, cause), 1
    for worker, events in readings.events().items():
        yield from _of_events(worker, events)
    for worker, kv in readings.kv().items():
        yield from _of_tiers(worker, kv)
    for worker, counted in readings.transfers().items():
        yield from _of_transfers(worker, counted)
    if (planner := readings.planner()) is not None:
        yield from _of_planner(planner)
        yield from _of_tuning(planner.get("tuning"))
    for process, counts in readings.refused().items():
        yield from _each(families.REFUSED_CONNECTIONS, (process,), counts)


def _of_front_door(readings: Readings) -> Samples:
    yield families.ACTIVE_REQUESTS, (), readings.running()
    yield families.QUEUED_REQUESTS, (), readings.queued()
    yield families.ROUTER_LOAD_PEERS, (), readings.load_peers()
    yield families.REGISTRY_AGE_SECONDS, (), readings.registry_age_s()
    yield families.BUILD_INFO, (__version__,), 1
    for family, by_model in (
        (families.MODEL_READY, readings.models_ready),
        (families.PROMPT_CACHE_BYTES, readings.prompt_cache_bytes),
        (families.ROUTER_QUEUE_REQUESTS, readings.router_queues),
    ):
        for model, value in by_model().items():
            yield family, (model,), value
    for model, queue in readings.prefill_queues().items():
        yield families.PREFILL_QUEUE_REQUESTS, (model,), queue.requests
        yield families.PREFILL_QUEUE_AGE_SECONDS, (model,), queue.oldest_s


def _each(family: Family, labels: tuple[str, ...], counts: Mapping[str, float]) -> Samples:
    """A sample for each value of the last label."""
    for last, count in counts.items():
        yield family, (*labels, last), count


_OF_SOURCES = {
    "lost": families.EVENT_MESSAGES_LOST,
    "gaps": families.EVENT_GAPS,
    "replays": families.EVENT_REPLAYS,
    "replays_failed": families.EVENT_REPLAYS_FAILED,
    "resyncs": families.EVENT_RESYNCS,
    "restarts": families.EVENT_ENGINE_RESTARTS,
    "interruptions": families.EVENT_INTERRUPTIONS,
}
"""By field of ``SequenceCounters``."""


def _of_events(worker: str, events: WorkerEvents) -> Samples:
    for level, blocks in zip(CacheLevel, events.blocks, strict=True):
        yield families.ROUTER_INDEXED_BLOCKS, (worker, level.name.lower()), blocks
    yield families.EVENT_MESSAGES, (worker,), events.messages
    yield families.EVENT_MESSAGES_UNDECODABLE, (worker,), events.decode_errors
    for field, family in _OF_SOURCES.items():
        yield family, (worker,), sum(getattr(source, field) for source in events.sources)


# Zeros before the first of them: a rate does not see a series begin at 1.
_NOT_LOADED = {"slower than recompute": 0, "tier is down": 0}
_PREFETCHED = {"brought": 0, "used": 0, "unused": 0}
_STORE_FAILED = {"write failed": 0, "not committed": 0, "no free slot": 0, "tier is down": 0}


def _of_tiers(worker: str, counted: KvStatistics) -> Samples:
    for tier in counted.tiers:
        yield from _of_tier(worker, tier)
    for edge in counted.edges:
        yield from _of_edge(worker, edge)
    for layers, (token, most) in counted.sequence_bytes.items():
        yield families.KV_TOKEN_BYTES, (worker, layers), token
        if most:
            yield families.KV_SEQUENCE_MOST_BYTES, (worker, layers), most


def _of_tier(worker: str, tier: TierState) -> Samples:
    labels = (worker, tier.name)
    yield families.KV_TIER_UP, labels, float(tier.up)
    for state in ("published", "staged", "leaving", "waiting", "loading", "retained"):
        yield families.KV_BLOCKS, (*labels, state), getattr(tier, state)
    if tier.capacity < UNBOUNDED:
        yield families.KV_CAPACITY_BLOCKS, labels, tier.capacity
    if tier.latency_s is not None and tier.block_s is not None:
        yield families.KV_LOAD_LATENCY_SECONDS, labels, tier.latency_s
        yield families.KV_LOAD_BLOCK_SECONDS, labels, tier.block_s
    yield from _each(families.KV_LOADS, labels, tier.loads)
    yield from _each(families.KV_NOT_LOADED, labels, {**_NOT_LOADED, **tier.not_loaded})
    yield from _each(families.KV_REMOVED, labels, tier.removed)
    yield from _each(families.KV_PREFETCHED, labels, {**_PREFETCHED, **tier.prefetched})
    corrupt = {"load": tier.loads.get("corrupt", 0), "verify": tier.removed.get(_VERIFY_CORRUPT, 0)}
    yield from _each(families.KV_FAILED_VERIFICATION, labels, corrupt)


def _of_edge(worker: str, edge: EdgeStatistics) -> Samples:
    labels = (worker, edge.source, edge.target)
    yield families.KV_STORED, labels, edge.stored
    yield from _each(families.KV_NOT_ADMITTED, labels, edge.not_admitted)
    yield from _each(families.KV_STORE_FAILED, labels, {**_STORE_FAILED, **edge.failed})
    if _SOURCE_CORRUPT in edge.failed:
        corrupt = edge.failed[_SOURCE_CORRUPT]
        yield families.KV_FAILED_VERIFICATION, (worker, edge.source, "move"), corrupt


def _of_transfers(worker: str, counted: TransferStatistics) -> Samples:
    yield families.WORKER_HELD_BLOCKS, (worker,), counted.exports.held_blocks
    for outcome in ("released", "failed", "lapsed"):
        yield families.WORKER_EXPORTS, (worker, outcome), getattr(counted.exports, outcome)
    for outcome in ("succeeded", "failed", "dropped"):
        yield families.WORKER_PULLS, (worker, outcome), getattr(counted.pulls, outcome)
    yield families.WORKER_PULLED_BYTES, (worker,), counted.pulls.pulled_bytes
    yield families.WORKER_NIXL_BYTES, (worker,), counted.pulls.nixl_bytes
    yield families.WORKER_PULL_SECONDS, (worker,), counted.pulls.pull_s


_OF_ROLES = {
    "desired": families.PLANNER_DESIRED_WORKERS,
    "proposed": families.PLANNER_PROPOSED_WORKERS,
    "ready": families.PLANNER_READY_WORKERS,
    "starting": families.PLANNER_STARTING_WORKERS,
    "draining": families.PLANNER_DRAINING_WORKERS,
    "samples": families.PLANNER_SPEED_SAMPLES,
    "residual": families.PLANNER_SPEED_RESIDUAL_RATIO,
}
"""By what the planner tells of each role."""


def _of_planner(status: Mapping[str, Any]) -> Samples:
    """See ``LivePlanner.status``."""
    if (last := status["last"]) is None:
        return
    for role, told in last["roles"].items():
        for name, family in _OF_ROLES.items():
            if told[name] is not None:
                yield family, (role,), told[name]
    for target in ("ttft", "itl"):
        if (attained := last["observed"][f"attained_{target}"]) is not None:
            yield families.PLANNER_ATTAINED_RATIO, (target,), attained
    if (waiting := last["observed"]["waiting_requests"]) is not None:
        yield families.PLANNER_WAITING_REQUESTS, (), waiting
    yield families.PLANNER_ACTS, (), status["mode"] == "act"
    yield families.PLANNER_TICK_SECONDS, (), status["tick_s"]
    yield families.PLANNER_PLANS, (), status["plans"]
    yield from _each(families.PLANNER_ACTIONS, (), status["actions"])
    yield families.PLANNER_WARNINGS, (), len(last["warnings"])


def _of_tuning(status: Mapping[str, Any] | None) -> Samples:
    """See ``LiveTuning.status``."""
    if not status:
        return
    yield from _each(families.PLANNER_TUNING_VALUE, (), status["options"])
    trial = status["trial"]
    yield families.PLANNER_TUNING_SHARE_RATIO, (), 0.0 if trial is None else trial["share"]
    for value, counted in zip(("before", "tried"), status["arms"] or (), strict=False):
        for outcome in ("ended", "missed", "failed"):
            yield families.PLANNER_TUNING_REQUESTS, (value, outcome), counted[outcome]
    yield from _each(families.PLANNER_TUNING_STEPS, (), status["steps"])

"""What routing knows of its workers' caches, and how it came to know it, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from commutator.kv.medium import Tier

if TYPE_CHECKING:
    from commutator.routing.event_health import EventWarning
    from commutator.routing.event_subscriber import WorkerEvents

__all__ = ["EventCollector"]

_OF_SOURCES = {
    "lost": ("messages_lost", "KV event messages of a worker that could not be had again."),
    "gaps": ("gaps", "Times that messages were missing before one that came."),
    "replays": ("replays", "Times that missed messages were asked for; some are regular checks."),
    "replays_failed": ("replays_failed", "Times that nobody answered, or not to the end."),
    "resyncs": ("resyncs", "Times that all that was known of a worker was dropped for a loss."),
    "restarts": ("engine_restarts", "Times that a worker's messages began anew."),
}
"""By field of ``SequenceCounters``: the end of the metric's name, and its meaning."""


class EventCollector(Collector):
    """``source`` gives what came from each worker, by worker id; ``warnings`` what is wrong now."""

    def __init__(self) -> None:
        self.source: Callable[[], Mapping[str, WorkerEvents]] = dict
        self.warnings: Callable[[], Iterable[EventWarning]] = list

    def collect(self) -> Iterable[Metric]:
        return _families(self.source(), self.warnings())

    def describe(self) -> Iterable[Metric]:
        return _families({}, ())


def _families(
    statistics: Mapping[str, WorkerEvents], warnings: Iterable[EventWarning]
) -> list[Metric]:
    present = GaugeMetricFamily(
        "commutator_router_event_warnings",
        "1 while this makes what is known of a worker's cache incomplete or wrong; /health says "
        "it in words.",
        labels=("worker", "cause"),
    )
    for worker, cause in sorted({(warning.worker_id, warning.cause) for warning in warnings}):
        present.add_metric((worker, cause), 1)
    indexed = GaugeMetricFamily(
        "commutator_router_indexed_blocks",
        "KV blocks that a worker is known, or guessed, to hold, in the router's block size.",
        labels=("worker", "tier"),
    )
    messages = _counter("messages", "KV event messages of a worker that were understood.")
    undecodable = _counter("messages_undecodable", "Messages of a worker that are no KV events.")
    of_sources = {field: _counter(*about) for field, about in _OF_SOURCES.items()}
    for worker, events in statistics.items():
        for tier, blocks in zip(Tier, events.blocks, strict=True):
            indexed.add_metric((worker, tier.name.lower()), blocks)
        messages.add_metric((worker,), events.messages)
        undecodable.add_metric((worker,), events.decode_errors)
        for field, family in of_sources.items():
            total = sum(getattr(source, field) for source in events.sources)
            family.add_metric((worker,), total)
    return [present, indexed, messages, undecodable, *of_sources.values()]


def _counter(name: str, meaning: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"commutator_router_event_{name}", meaning, labels=("worker",))

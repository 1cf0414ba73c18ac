"""Metrics of requests whose prefill and decode are apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["HandoverMetrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BANDWIDTH = tuple(float(10**power) for power in range(5, 12))


class HandoverMetrics:
    """An observer of hand-overs; see ``commutator.routing.handover_observer``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Counter(
            "commutator_disaggregation_decisions",
            "Requests that could have been prefilled elsewhere, by whether they were and why.",
            ("model", "separate", "reason"),
            registry=registry,
        )
        self._legs = Counter(
            "commutator_handover_legs",
            "Prefill and decode legs by how they ended; refused: no prefill worker had room.",
            ("model", "leg", "outcome"),
            registry=registry,
        )
        self._queue = Gauge(
            "commutator_prefill_queue_requests",
            "Requests waiting because every prefill worker is busy.",
            ("model",),
            registry=registry,
        )
        self._queue_age_s = Gauge(
            "commutator_prefill_queue_age_seconds",
            "How long the request has waited that waits longest for a prefill worker.",
            ("model",),
            registry=registry,
        )
        self._queue_s = Histogram(
            "commutator_prefill_queue_seconds",
            "How long requests waited that got a prefill worker after waiting.",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._handover_s = Histogram(
            "commutator_handover_seconds",
            "From the end of a prefill elsewhere to the decode worker's first token.",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._bytes = Counter(
            "commutator_handover_bytes",
            "KV bytes of the prompts that were handed over, less what was known to be cached.",
            ("model",),
            registry=registry,
        )
        self._bandwidth = Histogram(
            "commutator_handover_bandwidth_bytes_per_second",
            "KV bytes of each hand-over by its time after the prefill; part of them went before.",
            ("model",),
            buckets=_BANDWIDTH,
            registry=registry,
        )
        self._cancel_s = Histogram(
            "commutator_handover_cancel_seconds",
            "From the failure of one leg until the other was stopped.",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )

    def watch_queue(
        self, model: str, requests: Callable[[], float], oldest_s: Callable[[], float]
    ) -> None:
        """Read the prefill queue whenever it is scraped."""
        self._queue.labels(model).set_function(requests)
        self._queue_age_s.labels(model).set_function(oldest_s)

    def decided(self, model: str, separate: bool, reason: str) -> None:
        self._decisions.labels(model, "yes" if separate else "no", reason).inc()

    def prefill_queued(self, model: str, seconds: float) -> None:
        self._queue_s.labels(model).observe(seconds)

    def leg_ended(self, model: str, leg: Literal["prefill", "decode"], outcome: str) -> None:
        self._legs.labels(model, leg, outcome).inc()

    def handed_over(self, model: str, seconds: float, size_bytes: int) -> None:
        self._handover_s.labels(model).observe(seconds)
        self._bytes.labels(model).inc(size_bytes)
        if seconds > 0:
            self._bandwidth.labels(model).observe(size_bytes / seconds)

    def cancelled(self, model: str, seconds: float) -> None:
        self._cancel_s.labels(model).observe(seconds)

"""Prometheus metrics of one front-door process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from commutator.observe.handover_metrics import HandoverMetrics
from commutator.observe.kv_metrics import KvCollector
from commutator.observe.token_times import TokenTimes
from commutator.observe.worker_handover_metrics import WorkerHandoverCollector

if TYPE_CHECKING:
    from commutator.engine.handover import HandoverStatistics
    from commutator.kv.counters import KvStatistics
    from commutator.routing.route import RouteFacts

__all__ = ["FrontendMetrics"]

MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)

_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_DURATION_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LENGTH_BUCKETS = tuple(2**power for power in range(4, 18))
_RATE_BUCKETS = tuple(tenth / 10 for tenth in range(11))
_ROUTING_BUCKETS_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.005, 0.02)


class FrontendMetrics:
    """All metrics, in a registry of their own, so that a process may hold several."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._children: dict[Any, Any] = {}
        self.requests = Counter(
            "commutator_requests",
            "Requests answered; code 499 means that the client went away.",
            ("endpoint", "model", "code"),
            registry=registry,
        )
        self.active = Gauge(
            "commutator_active_requests", "Requests being served.", registry=registry
        )
        self.queued = Gauge(
            "commutator_queued_requests", "Requests waiting for a place.", registry=registry
        )
        self.rejected = Counter(
            "commutator_requests_rejected",
            "Requests answered 429; the reason is the error's code.",
            ("model", "reason"),
            registry=registry,
        )
        self.router_queue = Gauge(
            "commutator_router_queue_requests",
            "Requests waiting because every worker is busy.",
            ("model",),
            registry=registry,
        )
        self.router_queue_s = Histogram(
            "commutator_router_queue_seconds",
            "How long requests waited that got a worker after waiting.",
            ("model",),
            buckets=_DURATION_BUCKETS_S,
            registry=registry,
        )
        self.load_peers = Gauge(
            "commutator_router_load_peers",
            "Other front doors whose load this one hears of.",
            registry=registry,
        )
        self.ttft_s = Histogram(
            "commutator_time_to_first_token_seconds",
            "From a request's arrival to the first token of each answer.",
            ("model",),
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self.itl_s = Histogram(
            "commutator_inter_token_latency_seconds",
            "Between tokens of one answer; for tokens that came together, their mean.",
            ("model",),
            buckets=_ITL_BUCKETS_S,
            registry=registry,
        )
        self.duration_s = Histogram(
            "commutator_request_duration_seconds",
            "From a request's arrival to the end of the answer.",
            ("endpoint", "model"),
            buckets=_DURATION_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "commutator_prompt_tokens", "Prompt tokens of answers.", ("model",), registry=registry
        )
        self.cached_tokens = Counter(
            "commutator_cached_tokens",
            "Prompt tokens that the workers found in their KV caches.",
            ("model",),
            registry=registry,
        )
        self.prompt_cache_hits = Counter(
            "commutator_prompt_cache_hit_tokens",
            "Prompt tokens that the front door did not have to tokenize again.",
            ("model",),
            registry=registry,
        )
        self.prompt_cache_bytes = Gauge(
            "commutator_prompt_cache_bytes",
            "Memory that the front door's cache of tokenized prompts takes.",
            ("model",),
            registry=registry,
        )
        self.output_tokens = Counter(
            "commutator_output_tokens", "Tokens generated.", ("model",), registry=registry
        )
        self.input_lengths = Histogram(
            "commutator_input_sequence_tokens",
            "Prompt tokens of each request.",
            ("model",),
            buckets=_LENGTH_BUCKETS,
            registry=registry,
        )
        self.output_lengths = Histogram(
            "commutator_output_sequence_tokens",
            "Tokens generated for each request.",
            ("model",),
            buckets=_LENGTH_BUCKETS,
            registry=registry,
        )
        self.routing_s = Histogram(
            "commutator_router_decision_seconds",
            "Time to match a prompt against the prefix index and ask the policy.",
            ("model",),
            buckets=_ROUTING_BUCKETS_S,
            registry=registry,
        )
        self.overlap_blocks = Counter(
            "commutator_router_overlap_blocks",
            "Prompt blocks that the chosen worker was thought to hold.",
            ("model",),
            registry=registry,
        )
        self.hit_rate = Histogram(
            "commutator_router_kv_hit_rate",
            "The part of a prompt's blocks that the chosen worker was thought to hold, 0 to 1.",
            ("model",),
            buckets=_RATE_BUCKETS,
            registry=registry,
        )
        self.fallbacks = Counter(
            "commutator_router_fallbacks",
            "Requests whose policy failed; the worker with the fewest requests got them.",
            ("model",),
            registry=registry,
        )
        self.given_up_blocks = Counter(
            "commutator_router_given_up_blocks",
            "Prompt blocks that another worker held beyond the chosen one's: reuse for balance.",
            ("model",),
            registry=registry,
        )

        self.migrations = Counter(
            "commutator_migrations",
            "Answers that went on at another worker, by what became of the one before.",
            ("model", "reason"),
            registry=registry,
        )
        self.migrated_tokens = Counter(
            "commutator_migrated_tokens",
            "Tokens of prompts and answers computed again because their worker was lost.",
            ("model",),
            registry=registry,
        )
        self.handovers = HandoverMetrics(registry)
        self._kv = KvCollector()
        registry.register(self._kv)
        self._worker_handovers = WorkerHandoverCollector()
        registry.register(self._worker_handovers)

    def watch_kv(self, statistics: Callable[[], Mapping[str, KvStatistics]]) -> None:
        """Read the workers' counters of their storage tiers whenever they are scraped."""
        self._kv.source = statistics

    def watch_handovers(self, statistics: Callable[[], Mapping[str, HandoverStatistics]]) -> None:
        """Read the workers' counters of their hand-overs whenever they are scraped."""
        self._worker_handovers.source = statistics

    def watch_limiter(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Read the two gauges from the limiter whenever they are scraped."""
        self.active.set_function(running)
        self.queued.set_function(waiting)

    def watch_router_queue(self, model: str, waiting: Callable[[], float]) -> None:
        """Read the queue's length whenever it is scraped."""
        self._of(self.router_queue, model).set_function(waiting)

    def migrated(self, model: str, reason: str) -> None:
        self._of(self.migrations, model, reason).inc()

    def recomputed(self, model: str, tokens: int) -> None:
        self._of(self.migrated_tokens, model).inc(tokens)

    def request_rejected(self, model: str, reason: str) -> None:
        self._of(self.rejected, model, reason).inc()

    def request_done(self, endpoint: str, model: str, code: int, duration_s: float) -> None:
        self._of(self.requests, endpoint, model, str(code)).inc()
        self._of(self.duration_s, endpoint, model).observe(duration_s)

    def routed(self, model: str, facts: RouteFacts) -> None:
        """One decision: its time, and blocks of prompt reused and not reused."""
        self._of(self.routing_s, model).observe(facts.routing_s)
        self._of(self.overlap_blocks, model).inc(facts.overlap_blocks)
        self._of(self.given_up_blocks, model).inc(facts.given_up_blocks)
        if (hit_rate := facts.hit_rate) is not None:
            self._of(self.hit_rate, model).observe(hit_rate)
        if facts.waited_s:
            self._of(self.router_queue_s, model).observe(facts.waited_s)
        if facts.fallback:
            self._of(self.fallbacks, model).inc()

    def tokens_used(self, model: str, prompt: int, cached: int, generated: int) -> None:
        self._of(self.prompt_tokens, model).inc(prompt)
        self._of(self.cached_tokens, model).inc(cached)
        self._of(self.output_tokens, model).inc(generated)
        self._of(self.input_lengths, model).observe(prompt)
        self._of(self.output_lengths, model).observe(generated)

    def token_times(self, model: str, arrived_s: float) -> TokenTimes:
        """For one answer to a request that arrived at ``arrived_s`` (``time.perf_counter``)."""
        return TokenTimes(self._of(self.ttft_s, model), self._of(self.itl_s, model), arrived_s)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _of(self, metric: MetricT, *labels: str) -> MetricT:
        """``metric.labels``, without its conversions and its lock."""
        child: MetricT | None = self._children.get((metric, labels))
        if child is None:
            child = self._children[metric, labels] = metric.labels(*labels)
        return child

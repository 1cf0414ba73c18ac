"""Prometheus metrics of one front-door process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from commutator.observe.event_metrics import EventCollector
from commutator.observe.handover_metrics import HandoverMetrics
from commutator.observe.kv_metrics import KvCollector
from commutator.observe.tallies import Counter, Histogram
from commutator.observe.token_times import TokenTimes
from commutator.observe.worker_handover_metrics import WorkerHandoverCollector

if TYPE_CHECKING:
    from commutator.engine.handover import HandoverStatistics
    from commutator.kv.counters import KvStatistics
    from commutator.routing.event_health import EventWarning
    from commutator.routing.event_subscriber import WorkerEvents
    from commutator.routing.route import RouteFacts

__all__ = ["FrontendMetrics"]

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
        # Also counted by the threads that tokenize long prompts.
        self.prompt_cache_hits = prometheus_client.Counter(
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
            "Prompt blocks that the chosen worker was thought to hold; absent under policies that "
            "do not look.",
            ("model",),
            registry=registry,
        )
        self.hit_rate = Histogram(
            "commutator_router_kv_hit_rate",
            "The part of a prompt's blocks that the chosen worker was thought to hold, 0 to 1; "
            "absent under policies that do not look.",
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
            "Prompt blocks that another worker held beyond the chosen one's: reuse for balance; "
            "absent under policies that do not look.",
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
        self._events = EventCollector()
        registry.register(self._events)
        self._kv = KvCollector()
        registry.register(self._kv)
        self._worker_handovers = WorkerHandoverCollector()
        registry.register(self._worker_handovers)

    def watch_events(
        self,
        statistics: Callable[[], Mapping[str, WorkerEvents]],
        warnings: Callable[[], Sequence[EventWarning]],
    ) -> None:
        """Read what routing knows of the workers' caches whenever it is scraped."""
        self._events.source, self._events.warnings = statistics, warnings

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
        self.router_queue.labels(model).set_function(waiting)

    def migrated(self, model: str, reason: str) -> None:
        self.migrations.add(1, model, reason)

    def recomputed(self, model: str, tokens: int) -> None:
        self.migrated_tokens.add(tokens, model)

    def request_rejected(self, model: str, reason: str) -> None:
        self.rejected.add(1, model, reason)

    def request_done(self, endpoint: str, model: str, code: int, duration_s: float) -> None:
        self.requests.add(1, endpoint, model, str(code))
        self.duration_s.observe(duration_s, endpoint, model)

    def routed(self, model: str, facts: RouteFacts) -> None:
        """One decision: its time, and blocks of prompt reused and not reused, if looked up."""
        self.routing_s.observe(facts.routing_s, model)
        if (hit_rate := facts.hit_rate) is not None:
            self.hit_rate.observe(hit_rate, model)
            self.overlap_blocks.add(facts.overlap_blocks, model)
            self.given_up_blocks.add(facts.given_up_blocks, model)
        if facts.waited_s:
            self.router_queue_s.observe(facts.waited_s, model)
        if facts.fallback:
            self.fallbacks.add(1, model)

    def tokens_used(self, model: str, prompt: int, cached: int, generated: int) -> None:
        self.prompt_tokens.add(prompt, model)
        self.cached_tokens.add(cached, model)
        self.output_tokens.add(generated, model)
        self.input_lengths.observe(prompt, model)
        self.output_lengths.observe(generated, model)

    def token_times(self, model: str, arrived_s: float) -> TokenTimes:
        """For one answer to a request that arrived at ``arrived_s`` (``time.perf_counter``)."""
        return TokenTimes(self.ttft_s, self.itl_s, model, arrived_s)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

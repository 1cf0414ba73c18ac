"""Prometheus metrics of one front-door process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import prometheus_client
from attrs import frozen
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from commutator import __version__
from commutator.contract.disagg import DisaggAnswer, HandoverOutcome
from commutator.contract.observer import Observer
from commutator.contract.request import RequestOutcome, RequestSummary
from commutator.contract.worker import KvStatistics, TransferStatistics
from commutator.metrics.collectors import (
    AtScrape,
    event_metrics,
    gauge,
    gauge_by_model,
    kv_metrics,
    planner_metrics,
    refusal_metrics,
    transfer_metrics,
    version_metrics,
    warning_metrics,
    worker_metrics,
)
from commutator.metrics.tallies import OTHER, Counter, CounterGroup, Histogram
from commutator.routing.disagg.prefill_pool import QueueState
from commutator.routing.prefix_index.health import EventWarning
from commutator.routing.prefix_index.indexer import WorkerEvents
from commutator.routing.router import FALLBACK, Route
from commutator.routing.workers import WorkerStatus

__all__ = [
    "ITL_BUCKETS_S",
    "TTFT_BUCKETS_S",
    "FrontendMetrics",
    "Readings",
    "TokenTimes",
]

_MAX_PRINCIPALS = 500
"""Each takes a handful of time series, and Prometheus keeps every one that it ever saw."""
TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_DURATION_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LENGTH_BUCKETS = tuple(2**power for power in range(4, 18))
_RATE_BUCKETS = tuple(tenth / 10 for tenth in range(11))
_ROUTING_BUCKETS_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.005, 0.02)
_HANDOVER_BUCKETS_S = (0.001, 0.0025, *TTFT_BUCKETS_S)
_BANDWIDTH_BUCKETS = tuple(float(10**power) for power in range(5, 12))


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
    warnings: Callable[[], Iterable[EventWarning]] = tuple
    planner: Callable[[], Mapping[str, Any] | None] = lambda: None
    """What the planner last told of itself, as ``LivePlanner.status``; None without one."""


_DROP_REASONS = (
    *("full", "full_for_probes", "no_descriptors", "full_for_address", "not_accepted"),
    *("headers_too_slow", "headers_too_long", "unread_answer"),
)


class TokenTimes:
    """Times one answer's tokens."""

    def __init__(self, ttft: Histogram, itl: Histogram, model: str, arrived_s: float) -> None:
        self._ttft = ttft
        self._itl = itl
        self._model = model
        self._last_s = arrived_s
        self._arrived_s = arrived_s
        self.ttft_s: float | None = None

    def tokens(self, count: int) -> None:
        """``count`` tokens have come together."""
        now_s = time.perf_counter()
        if self.ttft_s is None:
            self.ttft_s = now_s - self._arrived_s
            self._ttft.observe(self.ttft_s, self._model)
        else:
            self._itl.observe((now_s - self._last_s) / count, self._model)
        self._last_s = now_s


class FrontendMetrics(Observer):
    """All metrics, in a registry of their own, so that a process may hold several.

    What the hooks carry is counted as an observer of them. Times of tokens and facts of routing
    decisions, which they do not carry, are counted by the methods that are no hooks.
    """

    def __init__(self, readings: Readings | None = None) -> None:
        """Without ``readings``, what is read at a scrape is zero or absent."""
        readings = readings or Readings()
        registry = self.registry = CollectorRegistry()
        counter = partial(Counter, labels=("model",), registry=registry)
        histogram = partial(Histogram, labels=("model",), registry=registry)
        self._requests = counter(
            "commutator_requests",
            "Requests answered; code 499 means that the client went away.",
            labels=("endpoint", "model", "code"),
        )
        self._rejected = counter(
            "commutator_requests_rejected",
            "Requests answered 429; the reason is the error's code.",
            labels=("model", "reason"),
        )
        self._dropped = counter(
            "commutator_connections_dropped",
            "Connections of clients that the front door closed or did not accept: one that waited "
            "longest for its client, because the door or its places for probes were full or files "
            "ran out (full, full_for_probes, no_descriptors); a new one (full_for_address, "
            "not_accepted); one with slow or long headers (headers_too_slow, headers_too_long); "
            "one that did not read its answer (unread_answer).",
            labels=("reason",),
        )
        for reason in _DROP_REASONS:
            self._dropped.add(0, reason)  # a rate does not see a series begin at 1
        self._router_queue_s = histogram(
            "commutator_router_queue_seconds",
            "Time that requests waited for a worker, of those that got one after a wait.",
            buckets=_DURATION_BUCKETS_S,
        )
        self._ttft_s = histogram(
            "commutator_time_to_first_token_seconds",
            "From a request's arrival to the first token of each answer.",
            buckets=TTFT_BUCKETS_S,
        )
        self._itl_s = histogram(
            "commutator_inter_token_latency_seconds",
            "Between tokens of one answer; for tokens that came together, their mean.",
            buckets=ITL_BUCKETS_S,
        )
        self._duration_s = histogram(
            "commutator_request_duration_seconds",
            "From a request's arrival to the end of the answer.",
            labels=("endpoint", "model"),
            buckets=_DURATION_BUCKETS_S,
        )
        self._tokens = CounterGroup(
            ("commutator_prompt_tokens", "Prompt tokens of answers."),
            (
                "commutator_cached_tokens",
                "Prompt tokens that the workers found in their KV caches.",
            ),
            ("commutator_output_tokens", "Tokens generated."),
            labels=("model",),
            registry=registry,
        )
        # Also counted by the threads that tokenize long prompts.
        self.prompt_cache_hits = prometheus_client.Counter(
            "commutator_prompt_cache_hit_tokens",
            "Prompt tokens that the front door did not have to tokenize again.",
            ("model",),
            registry=registry,
        )
        self.tokenizer_differences = prometheus_client.Counter(
            "commutator_tokenizer_differences",
            "Times that fastokens or the prompt cache gave other tokens than tokenizers; from then "
            "on, tokenizers alone tokenizes the model's prompts.",
            ("model",),
            registry=registry,
        )
        self._input_lengths = histogram(
            "commutator_input_sequence_tokens",
            "Prompt tokens of each request.",
            buckets=_LENGTH_BUCKETS,
        )
        self._output_lengths = histogram(
            "commutator_output_sequence_tokens",
            "Tokens generated for each request.",
            buckets=_LENGTH_BUCKETS,
        )
        self._routing_s = histogram(
            "commutator_router_decision_seconds",
            "Time to match a prompt against the prefix index and ask the policy.",
            buckets=_ROUTING_BUCKETS_S,
        )
        self._overlap_blocks = counter(
            "commutator_router_overlap_blocks",
            "Prompt blocks that the chosen worker was thought to hold; absent under policies that "
            "do not look.",
        )
        self._hit_rate = histogram(
            "commutator_router_kv_hit_rate",
            "The part of a prompt's blocks that the chosen worker was thought to hold, 0 to 1; "
            "absent under policies that do not look.",
            buckets=_RATE_BUCKETS,
        )
        self._fallbacks = counter(
            "commutator_router_fallbacks",
            "Requests whose policy failed; the worker with the fewest requests got them.",
        )
        self._given_up_blocks = counter(
            "commutator_router_given_up_blocks",
            "Prompt blocks that another worker held beyond the chosen one's: reuse for balance; "
            "absent under policies that do not look.",
        )
        self._migrations = counter(
            "commutator_migrations",
            "Answers that another worker continued, by what happened to the worker before.",
            labels=("model", "reason"),
        )
        self._migrated_tokens = counter(
            "commutator_migrated_tokens",
            "Tokens of prompts and answers computed again because their worker was lost.",
        )
        self._decisions = counter(
            "commutator_disaggregation_decisions",
            "Requests that could have been prefilled elsewhere, by whether they were and why.",
            labels=("model", "separate", "reason"),
        )
        self._legs = counter(
            "commutator_handover_legs",
            "Prefill and decode sides by how they ended; refused: no prefill worker had room.",
            labels=("model", "leg", "outcome"),
        )
        self._prefill_queue_s = histogram(
            "commutator_prefill_queue_seconds",
            "Time that requests waited for a prefill worker, of those that got one after a wait.",
            buckets=_HANDOVER_BUCKETS_S,
        )
        self._handover_s = histogram(
            "commutator_handover_seconds",
            "From the end of a prefill elsewhere to the decode worker's first token.",
            buckets=_HANDOVER_BUCKETS_S,
        )
        self._handover_bytes = counter(
            "commutator_handover_bytes",
            "KV bytes of the prompts that were handed over, less what was known to be cached.",
        )
        self._bandwidth = histogram(
            "commutator_handover_bandwidth_bytes_per_second",
            "KV bytes of each hand-over by its time after the prefill; part of them went before.",
            buckets=_BANDWIDTH_BUCKETS,
        )
        self.principal_usage = CounterGroup(
            (
                "commutator_principal_requests",
                f"Requests of a principal; `other`: of all after the first {_MAX_PRINCIPALS}.",
            ),
            ("commutator_principal_prompt_tokens", "Prompt tokens of a principal's requests."),
            (
                "commutator_principal_cached_tokens",
                "Prompt tokens of a principal that the workers found in their KV caches.",
            ),
            ("commutator_principal_output_tokens", "Tokens generated for a principal."),
            labels=("principal",),
            registry=registry,
            most=_MAX_PRINCIPALS,
        )
        """By principal: one request, its prompt tokens, those cached, those generated."""
        self._principal_refusals = counter(
            "commutator_principal_refusals",
            "Requests of a principal answered 403 or 429, by the limit or the error's code.",
            labels=("principal", "reason"),
        )
        self._cancel_s = histogram(
            "commutator_handover_cancel_seconds",
            "From the failure of one side until the other was stopped.",
            buckets=_HANDOVER_BUCKETS_S,
        )
        for collector in _collectors(readings):
            registry.register(collector)

    def model_served(self, name: str) -> None:
        """Count the rare events of a model from 0: a rate does not see a series begin at 1."""
        self._fallbacks.add(0, name)

    def request_queued(
        self, request: RequestSummary, queue: Literal["router", "prefill"], waited_s: float
    ) -> None:
        waits = self._prefill_queue_s if queue == "prefill" else self._router_queue_s
        waits.observe(waited_s, request.model)

    def disagg_decided(self, request: RequestSummary, answer: DisaggAnswer) -> None:
        separate = "yes" if answer.separate else "no"
        self._decisions.add(1, request.model, separate, answer.reason)

    def kv_handed_over(self, request: RequestSummary, handover: HandoverOutcome) -> None:
        model, seconds = request.model, handover.handover_s
        self._legs.add(1, model, "prefill", handover.prefill)
        if handover.decode is not None:
            self._legs.add(1, model, "decode", handover.decode)
        if seconds is not None:
            self._handover_s.observe(seconds, model)
            self._handover_bytes.add(handover.size_bytes, model)
            if seconds > 0:
                self._bandwidth.observe(handover.size_bytes / seconds, model)
        if handover.cancel_s is not None:
            self._cancel_s.observe(handover.cancel_s, model)

    def request_migrated(
        self,
        request: RequestSummary,
        from_worker: str,
        to_worker: str,
        reason: str,
        generated_tokens: int,
    ) -> None:
        self._migrations.add(1, request.model, reason)

    def request_finished(self, request: RequestSummary, outcome: RequestOutcome) -> None:
        self._migrated_tokens.add(outcome.recomputed_tokens, request.model)

    def request_rejected(self, model: str, reason: str) -> None:
        self._rejected.add(1, model, reason)

    def connection_dropped(self, reason: str) -> None:
        """A client's connection was closed, or not accepted, without an answer to a request."""
        self._dropped.add(1, reason)

    def request_done(self, endpoint: str, model: str, code: int, duration_s: float) -> None:
        self._requests.add(1, endpoint, model, str(code))
        self._duration_s.observe(duration_s, endpoint, model)

    def principal_refused(self, principal: str, reason: str) -> None:
        """After ``principal_usage``; ``reason`` is a limit's name or an error's code."""
        is_counted = (principal,) in self.principal_usage.sums()
        self._principal_refusals.add(1, principal if is_counted else OTHER, reason)

    def routed(self, model: str, route: Route) -> None:
        """One decision: its time, and blocks of prompt reused and not reused, if looked up."""
        self._routing_s.observe(route.routing_s, model)
        if route.sequence_hashes:
            blocks = route.candidate.overlap.blocks
            self._hit_rate.observe(blocks / len(route.sequence_hashes), model)
            self._overlap_blocks.add(blocks, model)
            self._given_up_blocks.add(route.given_up_blocks, model)
        if route.decision.policy == FALLBACK:
            self._fallbacks.add(1, model)

    def tokens_used(self, model: str, prompt: int, cached: int, generated: int) -> None:
        self._tokens.add((model,), prompt, cached, generated)
        self._input_lengths.observe(prompt, model)
        self._output_lengths.observe(generated, model)

    def token_times(self, model: str, arrived_s: float) -> TokenTimes:
        """For one answer to a request that arrived at ``arrived_s`` (``time.perf_counter``)."""
        return TokenTimes(self._ttft_s, self._itl_s, model, arrived_s)

    def totals(self) -> dict[str, Any]:
        """What the live view needs, since start: numbers, lists of them, and dicts of either.

        Requests for a served model only, by how they ended: "ok", "refused" (4xx) or "failed".
        """
        requests = {"ok": 0.0, "refused": 0.0, "failed": 0.0}
        for (_, model, code), count in self._requests.sums().items():
            if model:
                requests[_ending(code)] += count
        names = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
        principals = {
            principal: dict(zip(names, sums, strict=True))
            for (principal,), sums in self.principal_usage.sums().items()
        }
        refusals: dict[str, float] = {}
        for (principal, _), count in self._principal_refusals.sums().items():
            refusals[principal] = refusals.get(principal, 0.0) + count
        for principal, count in refusals.items():
            principals.setdefault(principal, {})["refused"] = count
        by_model = self._tokens.sums().values()
        tokens = [sum(sums[number] for sums in by_model) for number in range(3)]
        ttft, ttft_s = self._ttft_s.summed()
        itl, itl_s = self._itl_s.summed()
        return {
            "requests": requests,
            "prompt_tokens": tokens[0],
            "cached_tokens": tokens[1],
            "output_tokens": tokens[2],
            "migrations": sum(self._migrations.sums().values()),
            "ttft": {"counts": ttft, "sum_s": ttft_s},
            "itl": {"counts": itl, "sum_s": itl_s},
            "principals": principals,
        }

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


_CLIENT_GONE = "499"


def _ending(code: str) -> str:
    """How a request with this status ended. A client that went away had what it wanted."""
    if code[0] in "23" or code == _CLIENT_GONE:
        return "ok"
    return "refused" if code[0] == "4" else "failed"


def _collectors(readings: Readings) -> Iterable[Collector]:
    """What reads ``readings`` at each scrape."""
    yield gauge("commutator_active_requests", "Requests being served.", readings.running)
    yield gauge(
        "commutator_queued_requests",
        "Requests waiting for a place in the front door.",
        readings.queued,
    )
    yield gauge(
        "commutator_router_load_peers",
        "Other front doors that share their load with this one.",
        readings.load_peers,
    )
    yield gauge(
        "commutator_registry_age_seconds",
        "Seconds since the registry confirmed this front door's view of the workers.",
        readings.registry_age_s,
    )
    yield AtScrape(lambda: (__version__,), version_metrics)
    yield gauge_by_model(
        "commutator_model_ready",
        "1 while the model has the workers that it needs to be served, 0 otherwise.",
        readings.models_ready,
    )
    yield AtScrape(readings.workers, worker_metrics)
    yield gauge_by_model(
        "commutator_prompt_cache_bytes",
        "Memory that the front door's cache of tokenized prompts takes.",
        readings.prompt_cache_bytes,
    )
    yield gauge_by_model(
        "commutator_router_queue_requests",
        "Requests waiting because every worker is busy.",
        readings.router_queues,
    )
    yield gauge_by_model(
        "commutator_prefill_queue_requests",
        "Requests waiting because every prefill worker is busy.",
        lambda: {name: queue.requests for name, queue in readings.prefill_queues().items()},
    )
    yield gauge_by_model(
        "commutator_prefill_queue_age_seconds",
        "Age of the oldest request waiting for a prefill worker.",
        lambda: {name: queue.oldest_s for name, queue in readings.prefill_queues().items()},
    )
    yield AtScrape(readings.warnings, warning_metrics)
    yield AtScrape(lambda: readings.events().items(), event_metrics)
    yield AtScrape(lambda: readings.kv().items(), kv_metrics)
    yield AtScrape(lambda: readings.transfers().items(), transfer_metrics)
    yield AtScrape(lambda: filter(None, [readings.planner()]), planner_metrics)
    yield AtScrape(lambda: readings.refused().items(), refusal_metrics)

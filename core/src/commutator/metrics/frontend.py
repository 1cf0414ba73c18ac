"""Prometheus metrics of one front-door process.

Counters and histograms of one thread, for what is counted at every request: Prometheus' own ask at
each step whether they may and take a lock each time; these only add, and look the same to who
scrapes them.
"""

from __future__ import annotations

import math
import operator
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import prometheus_client
from attrs import define, field
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from commutator.contract.disagg import DisaggAnswer, HandoverOutcome
from commutator.contract.observer import Observer
from commutator.contract.request import RequestOutcome, RequestSummary
from commutator.metrics import families
from commutator.metrics.families import Family
from commutator.metrics.readings import AtScrape, Readings
from commutator.routing.router import FALLBACK, Route

Labels = tuple[str, ...]

OTHER = "other"
"""Stands for label values that are not counted by themselves."""


class _Tally(Collector):
    """What is counted for families of the same labels. Used from one thread."""

    def __init__(self, families: Sequence[Family], registry: CollectorRegistry) -> None:
        self._families = families
        registry.register(self)

    def describe(self) -> list[Any]:
        """Prometheus' own descriptions, without samples."""
        return [family.metric() for family in self._families]


class Counter(_Tally):
    """Sums by label values, of several families those counted together. Used from one thread."""

    def __init__(
        self, registry: CollectorRegistry, *families: Family, most: float = math.inf
    ) -> None:
        """``families`` have the same labels.

        After the first ``most`` combinations of label values, all others count as ``OTHER``.
        """
        super().__init__(families, registry)
        self._most = most
        self._sums: dict[Labels, list[float]] = {}
        self._created_s: dict[Labels, float] = {}

    def add(self, labels: Labels, *amounts: float) -> None:
        """``labels`` are the values, ``amounts`` one for each sum, not negative; both in order."""
        sums = self._sums.get(labels)
        if sums is None:
            sums = self._begin(labels)
        sums[:] = map(operator.add, sums, amounts)

    def _begin(self, labels: Labels) -> list[float]:
        """The sums of ``labels``, which have none of their own yet."""
        if len(self._sums) >= self._most:
            labels = (OTHER,) * len(labels)
        self._created_s.setdefault(labels, time.time())
        return self._sums.setdefault(labels, [0.0] * len(self._families))

    def sums(self) -> Mapping[Labels, Sequence[float]]:
        """The sums of each combination of label values since start; they change with additions."""
        return self._sums

    def collect(self) -> Iterable[Metric]:
        metrics = self.describe()
        for labels, sums in self._sums.items():
            for metric, total in zip(metrics, sums, strict=True):
                metric.add_metric(labels, total, self._created_s[labels])
        return metrics


@define
class _Counts:
    by_bucket: list[int]
    total: float = 0.0
    created_s: float = field(factory=time.time)


class Histogram(_Tally):
    """Counts of observations by bucket and label values. Used from one thread."""

    def __init__(self, family: Family, registry: CollectorRegistry) -> None:
        super().__init__((family,), registry)
        self._bounds = [float(bound) for bound in family.buckets]
        self._counts: dict[Labels, _Counts] = {}

    def observe(self, value: float, *labels: str) -> None:
        """``labels`` are the values, in order."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = _Counts([0] * (len(self._bounds) + 1))
        counts.by_bucket[bisect_left(self._bounds, value)] += 1
        counts.total += value

    def summed(self) -> tuple[list[int], float]:
        """Over all label values: observations by bucket, the last beyond all bounds, and their sum.

        The list is as long as ``buckets`` plus 1.
        """
        by_bucket, total = [0] * (len(self._bounds) + 1), 0.0
        for counts in self._counts.values():
            by_bucket = [
                one + other for one, other in zip(by_bucket, counts.by_bucket, strict=True)
            ]
            total += counts.total
        return by_bucket, total

    def collect(self) -> Iterable[Metric]:
        (family,) = self._families
        metric = family.metric()
        bounds = (*self._bounds, float("inf"))
        names = [floatToGoString(bound) for bound in bounds]  # type: ignore[no-untyped-call]
        for labels, counts in self._counts.items():
            below, buckets = 0, []
            for name, count in zip(names, counts.by_bucket, strict=True):
                below += count
                buckets.append((name, below))
            metric.add_metric(labels, buckets, counts.total)
            named = dict(zip(family.labels, labels, strict=True))
            metric.samples.append(Sample(f"{metric.name}_created", named, counts.created_s))
        return [metric]


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

    content_type = CONTENT_TYPE_LATEST
    """Of what ``render`` returns."""

    def __init__(self, readings: Readings | None = None) -> None:
        """Without ``readings``, what is read at a scrape is zero or absent."""
        registry = self.registry = CollectorRegistry()
        self._requests = Counter(registry, families.REQUESTS)
        self._rejected = Counter(registry, families.REQUESTS_REJECTED)
        self._dropped = Counter(registry, families.CONNECTIONS_DROPPED)
        for reason in _DROP_REASONS:
            self._dropped.add((reason,), 0)  # a rate does not see a series begin at 1
        self._long_turns = Counter(registry, families.LONG_TURNS, families.LONG_TURN_SECONDS)
        self._long_turns.add((), 0, 0)
        self._router_queue_s = Histogram(families.ROUTER_QUEUE_SECONDS, registry)
        self._ttft_s = Histogram(families.TIME_TO_FIRST_TOKEN_SECONDS, registry)
        self._itl_s = Histogram(families.INTER_TOKEN_LATENCY_SECONDS, registry)
        self._duration_s = Histogram(families.REQUEST_DURATION_SECONDS, registry)
        self._tokens = Counter(
            registry, families.PROMPT_TOKENS, families.CACHED_TOKENS, families.OUTPUT_TOKENS
        )
        # Also counted by the threads that tokenize long prompts.
        self.prompt_cache_hits = _shared_counter(families.PROMPT_CACHE_HIT_TOKENS, registry)
        self.tokenizer_differences = _shared_counter(families.TOKENIZER_DIFFERENCES, registry)
        self._input_lengths = Histogram(families.INPUT_SEQUENCE_TOKENS, registry)
        self._output_lengths = Histogram(families.OUTPUT_SEQUENCE_TOKENS, registry)
        self._routing_s = Histogram(families.ROUTER_DECISION_SECONDS, registry)
        self._overlap_blocks = Counter(registry, families.ROUTER_OVERLAP_BLOCKS)
        self._hit_rate = Histogram(families.ROUTER_KV_HIT_RATE, registry)
        self._fallbacks = Counter(registry, families.ROUTER_FALLBACKS)
        self._given_up_blocks = Counter(registry, families.ROUTER_GIVEN_UP_BLOCKS)
        self._migrations = Counter(registry, families.MIGRATIONS)
        self._migrated_tokens = Counter(registry, families.MIGRATED_TOKENS)
        self._decisions = Counter(registry, families.DISAGGREGATION_DECISIONS)
        self._legs = Counter(registry, families.HANDOVER_LEGS)
        self._prefill_queue_s = Histogram(families.PREFILL_QUEUE_SECONDS, registry)
        self._handover_s = Histogram(families.HANDOVER_SECONDS, registry)
        self._handover_bytes = Counter(registry, families.HANDOVER_BYTES)
        self._bandwidth = Histogram(families.HANDOVER_BANDWIDTH_BYTES_PER_SECOND, registry)
        self.principal_usage = Counter(
            registry,
            families.PRINCIPAL_REQUESTS,
            families.PRINCIPAL_PROMPT_TOKENS,
            families.PRINCIPAL_CACHED_TOKENS,
            families.PRINCIPAL_OUTPUT_TOKENS,
            most=families.MAX_PRINCIPALS,
        )
        """By principal: one request, its prompt tokens, those cached, those generated."""
        self._aliases = Counter(registry, families.ALIAS_REQUESTS)
        self._model_fallbacks = Counter(registry, families.MODEL_FALLBACKS)
        self._principal_refusals = Counter(registry, families.PRINCIPAL_REFUSALS)
        self._cancel_s = Histogram(families.HANDOVER_CANCEL_SECONDS, registry)
        registry.register(AtScrape(readings or Readings()))

    def model_served(self, name: str) -> None:
        """Count the rare events of a model from 0: a rate does not see a series begin at 1."""
        self._fallbacks.add((name,), 0)

    def request_queued(
        self, request: RequestSummary, queue: Literal["router", "prefill"], waited_s: float
    ) -> None:
        waits = self._prefill_queue_s if queue == "prefill" else self._router_queue_s
        waits.observe(waited_s, request.model)

    def disagg_decided(self, request: RequestSummary, answer: DisaggAnswer) -> None:
        separate = "yes" if answer.separate else "no"
        self._decisions.add((request.model, separate, answer.reason), 1)

    def kv_handed_over(self, request: RequestSummary, handover: HandoverOutcome) -> None:
        model, seconds = request.model, handover.handover_s
        self._legs.add((model, "prefill", handover.prefill), 1)
        if handover.decode is not None:
            self._legs.add((model, "decode", handover.decode), 1)
        if seconds is not None:
            self._handover_s.observe(seconds, model)
            self._handover_bytes.add((model,), handover.size_bytes)
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
        self._migrations.add((request.model, reason), 1)

    def request_finished(self, request: RequestSummary, outcome: RequestOutcome) -> None:
        self._migrated_tokens.add((request.model,), outcome.recomputed_tokens)

    def request_rejected(self, model: str, reason: str) -> None:
        self._rejected.add((model, reason), 1)

    def connection_dropped(self, reason: str) -> None:
        """A client's connection was closed, or not accepted, without an answer to a request."""
        self._dropped.add((reason,), 1)

    def turn_was_long(self, took_s: float) -> None:
        """The event loop computed for ``took_s`` seconds without a turn for others."""
        self._long_turns.add((), 1, took_s)

    def request_done(self, endpoint: str, model: str, code: int, duration_s: float) -> None:
        self._requests.add((endpoint, model, str(code)), 1)
        self._duration_s.observe(duration_s, endpoint, model)

    def alias_served(self, alias: str, model: str) -> None:
        """A request for ``alias`` ended that ``model`` was to serve."""
        self._aliases.add((alias, model), 1)

    def fell_back(self, alias: str, model: str, to: str, reason: str) -> None:
        """``to`` serves a request for ``alias`` because ``model`` could not."""
        self._model_fallbacks.add((alias, model, to, reason), 1)

    def principal_refused(self, principal: str, reason: str) -> None:
        """After ``principal_usage``; ``reason`` is a limit's name or an error's code."""
        is_counted = (principal,) in self.principal_usage.sums()
        self._principal_refusals.add((principal if is_counted else OTHER, reason), 1)

    def routed(self, model: str, route: Route) -> None:
        """One decision: its time, and blocks of prompt reused and not reused, if looked up."""
        self._routing_s.observe(route.routing_s, model)
        if route.sequence_hashes:
            blocks = route.candidate.overlap.blocks
            self._hit_rate.observe(blocks / len(route.sequence_hashes), model)
            self._overlap_blocks.add((model,), blocks)
            self._given_up_blocks.add((model,), route.given_up_blocks)
        if route.decision.policy == FALLBACK:
            self._fallbacks.add((model,), 1)

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
        for (_, model, code), (count,) in self._requests.sums().items():
            if model:
                requests[_ending(code)] += count
        names = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
        principals = {
            principal: dict(zip(names, sums, strict=True))
            for (principal,), sums in self.principal_usage.sums().items()
        }
        refusals: dict[str, float] = {}
        for (principal, _), (count,) in self._principal_refusals.sums().items():
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
            "migrations": sum(count for (count,) in self._migrations.sums().values()),
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


def _shared_counter(family: Family, registry: CollectorRegistry) -> prometheus_client.Counter:
    """Prometheus' own, which threads may share."""
    return prometheus_client.Counter(family.name, family.meaning, family.labels, registry=registry)

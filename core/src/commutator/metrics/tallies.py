"""Counters and histograms of one thread, for what is counted at every request.

Prometheus' own ask at each step whether they may and take a lock each time; these only add, and
look the same to who scrapes them.
"""

from __future__ import annotations

import math
import operator
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from attrs import define, field
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from commutator.metrics.families import Family

__all__ = [
    "OTHER",
    "Counter",
    "CounterGroup",
    "Histogram",
]

Labels = tuple[str, ...]

OTHER = "other"
"""Stands for label values that are not counted by themselves."""


class Counter(Collector):
    """Sums by label values. Used from one thread."""

    def __init__(self, family: Family, registry: CollectorRegistry) -> None:
        self._family = family
        self._sums: dict[Labels, float] = {}
        self._created_s: dict[Labels, float] = {}
        registry.register(self)

    def add(self, amount: float, *labels: str) -> None:
        """``amount`` is not negative; ``labels`` are the values, in order."""
        try:
            self._sums[labels] += amount
        except KeyError:
            self._sums[labels] = amount
            self._created_s[labels] = time.time()

    def sums(self) -> Mapping[Labels, float]:
        """The sum of each combination of label values since start; changes with later additions."""
        return self._sums

    def collect(self) -> Iterable[Metric]:
        metric = self._family.counter()
        for labels, total in self._sums.items():
            metric.add_metric(labels, total, self._created_s[labels])
        return [metric]

    def describe(self) -> Iterable[Metric]:
        return [self._family.counter()]


class CounterGroup(Collector):
    """Several sums that are counted together, by the same label values. Used from one thread."""

    def __init__(
        self, families: Sequence[Family], registry: CollectorRegistry, *, most: float = math.inf
    ) -> None:
        """``families`` have the same labels.

        After the first ``most`` combinations of label values, all others count as ``OTHER``.
        """
        self._families = families
        self._most = most
        self._sums: dict[Labels, list[float]] = {}
        self._created_s: dict[Labels, float] = {}
        registry.register(self)

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
        metrics = [family.counter() for family in self._families]
        for labels, sums in self._sums.items():
            for metric, total in zip(metrics, sums, strict=True):
                metric.add_metric(labels, total, self._created_s[labels])
        return metrics

    def describe(self) -> Iterable[Metric]:
        return [family.counter() for family in self._families]


@define
class _Counts:
    by_bucket: list[int]
    total: float = 0.0
    created_s: float = field(factory=time.time)


class Histogram(Collector):
    """Counts of observations by bucket and label values. Used from one thread."""

    def __init__(self, family: Family, registry: CollectorRegistry) -> None:
        self._family = family
        self._bounds = [float(bound) for bound in family.buckets]
        self._counts: dict[Labels, _Counts] = {}
        registry.register(self)

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
        metric = self._family.histogram()
        bounds = (*self._bounds, float("inf"))
        names = [floatToGoString(bound) for bound in bounds]  # type: ignore[no-untyped-call]
        for labels, counts in self._counts.items():
            below, buckets = 0, []
            for name, count in zip(names, counts.by_bucket, strict=True):
                below += count
                buckets.append((name, below))
            metric.add_metric(labels, buckets, counts.total)
            named = dict(zip(self._family.labels, labels, strict=True))
            metric.samples.append(Sample(f"{metric.name}_created", named, counts.created_s))
        return [metric]

    def describe(self) -> Iterable[Metric]:
        return [self._family.histogram()]

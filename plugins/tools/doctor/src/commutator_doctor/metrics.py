"""Prometheus' text format, as far as checks need it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from attrs import frozen

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PREFIX = "commutator_"

Labels = frozenset[tuple[str, str]]


@frozen
class Metrics:
    """Samples by name and labels."""

    samples: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def parse(cls, page: str) -> Metrics:
        """Of a page; lines of another form are left out. Labels of front doors are added up."""
        samples: dict[str, dict[Labels, float]] = {}
        for line in page.splitlines():
            found = _SAMPLE.match(line)
            if found is None:
                continue
            name, labels, value = found.groups()
            try:
                number = float(value)
            except ValueError:
                continue
            pairs = frozenset(
                pair for pair in _LABEL.findall(labels or "") if pair[0] != "frontend"
            )
            series = samples.setdefault(name, {})
            series[pairs] = series.get(pairs, 0.0) + number
        return cls(samples)

    def since(self, earlier: Metrics) -> Metrics:
        """What was counted after ``earlier``; gauges as they are now."""
        return Metrics(
            {
                name: {
                    labels: value - earlier.samples.get(name, {}).get(labels, 0.0)
                    if name.endswith(("_total", "_sum", "_count", "_bucket"))
                    else value
                    for labels, value in series.items()
                }
                for name, series in self.samples.items()
            }
        )

    def each(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and value of the samples of ``commutator_NAME`` that have ``labels``."""
        wanted = set(labels.items())
        for pairs, value in self.samples.get(_PREFIX + name, {}).items():
            if wanted <= pairs:
                yield dict(pairs), value

    def sum(self, name: str, **labels: str) -> float:
        """Their sum; 0 without any."""
        return sum(value for _, value in self.each(name, **labels))

    def has(self, name: str) -> bool:
        """Whether there are any."""
        return bool(self.samples.get(_PREFIX + name))

    def mean(self, name: str, **labels: str) -> float | None:
        """Of a histogram; None without observations."""
        count = self.sum(f"{name}_count", **labels)
        return self.sum(f"{name}_sum", **labels) / count if count > 0 else None

    def quantile(self, name: str, part: float, **labels: str) -> float | None:
        """The end of the bucket in which the quantile of a histogram lies; None without any."""
        buckets: dict[float, float] = {}
        for found, value in self.each(f"{name}_bucket", **labels):
            end = float(found.get("le", "inf"))
            buckets[end] = buckets.get(end, 0.0) + value
        total = max(buckets.values(), default=0.0)
        if total <= 0:
            return None
        return min(end for end, value in buckets.items() if value >= part * total)

    def by(self, name: str, label: str, where: Callable[[float], bool] = bool) -> dict[str, float]:
        """Sums by the values of one label, of those that ``where`` accepts."""
        sums: dict[str, float] = {}
        for labels, value in self.each(name):
            key = labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return {key: value for key, value in sums.items() if where(value)}

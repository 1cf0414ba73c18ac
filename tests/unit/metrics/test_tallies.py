"""Our counters and histograms look to who scrapes them as Prometheus' own do."""

from __future__ import annotations

import re
import time

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from commutator.metrics.families import Family
from commutator.metrics.frontend import Counter, Histogram

BUCKETS = (0.5, 1, 2.5)
LABELS = ("model", "reason")

labels = st.tuples(st.sampled_from(["a", 'b"\n']), st.sampled_from(["x", "y"]))
amounts = st.floats(0, 5) | st.sampled_from([0, 0.5, 1, 2.5, 1_000_000])


def shown(registry: CollectorRegistry) -> list[list[str]]:
    """What is scraped, less the times of creation."""
    openmetrics: bytes = generate_openmetrics(registry)  # type: ignore[no-untyped-call]
    texts = [generate_latest(registry).decode(), openmetrics.decode()]
    return [[re.sub(r"(_created\S* ).*", r"\1", line) for line in t.split("\n")] for t in texts]


@given(st.lists(st.tuples(labels, amounts)))
def test_as_prometheus_own(steps: list[tuple[tuple[str, str], float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    sums = Counter(ours, Family("some_requests", "counter", LABELS, "Of a kind."))
    spread = Histogram(Family("some_seconds", "histogram", LABELS, "Taken.", BUCKETS), ours)
    their_sums = prometheus_client.Counter("some_requests", "Of a kind.", LABELS, registry=theirs)
    their_spread = prometheus_client.Histogram(
        "some_seconds", "Taken.", LABELS, buckets=BUCKETS, registry=theirs
    )
    for values, amount in steps:
        sums.add(values, amount)
        their_sums.labels(*values).inc(amount)
        spread.observe(amount, *values)
        their_spread.labels(*values).observe(amount)
    assert shown(ours) == shown(theirs)


@given(st.lists(st.tuples(labels, st.tuples(amounts, amounts))))
def test_a_group_as_counters_of_prometheus(
    steps: list[tuple[tuple[str, str], tuple[float, float]]],
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    abouts = (("some_requests", "Of a kind."), ("some_tokens", "Of them."))
    families = [Family(name, "counter", LABELS, meaning) for name, meaning in abouts]
    group = Counter(ours, *families)
    separate = [prometheus_client.Counter(*about, LABELS, registry=theirs) for about in abouts]
    for values, counted in steps:
        group.add(values, *counted)
        for counter, amount in zip(separate, counted, strict=True):
            counter.labels(*values).inc(amount)
    assert shown(ours) == shown(theirs)


def test_the_time_of_creation_is_that_of_the_first_count() -> None:
    registry = CollectorRegistry()
    before_s = time.time()
    Counter(registry, Family("some", "counter", ("model",), "Of a kind.")).add(("a",), 1)
    after_s = time.time()
    created_s = registry.get_sample_value("some_created", {"model": "a"})
    assert created_s is not None
    assert before_s <= created_s <= after_s

"""What the metrics count as an observer of a plugin host."""

from __future__ import annotations

from attrs import evolve
from prometheus_client.parser import text_string_to_metric_families

from commutator.contract.disagg import DisaggAnswer, HandoverOutcome
from commutator.contract.request import RequestSummary
from commutator.metrics.frontend import FrontendMetrics
from commutator.plugins import PluginHost

REQUEST = RequestSummary(request_id="a", model="m", prompt_tokens=9, max_tokens=3)
HANDOVER = HandoverOutcome(
    prefill_worker="p",
    decode_worker="d",
    prefill="done",
    decode="done",
    handover_s=0.5,
    size_bytes=1000,
    cancel_s=None,
)


def test_hooks_are_counted() -> None:
    """Samples by name and the values of the labels, in the order of the labels' names."""
    host, metrics = PluginHost(), FrontendMetrics()
    host.add_observer("metrics", metrics)
    host.request_queued(REQUEST, "router", 2.0)
    host.request_queued(REQUEST, "prefill", 3.0)
    host.disagg_decided(REQUEST, DisaggAnswer(separate=True, reason="long"))
    host.kv_handed_over(REQUEST, HANDOVER)
    failed = evolve(HANDOVER, prefill="failed", decode=None, handover_s=None, cancel_s=0.25)
    host.kv_handed_over(REQUEST, failed)
    host.request_migrated(REQUEST, "d", "e", "lost", 1)
    found = {
        (
            sample.name.removeprefix("commutator_"),
            *dict(sorted(sample.labels.items())).values(),
        ): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }
    expected = {
        ("router_queue_seconds_sum", "m"): 2,
        ("prefill_queue_seconds_sum", "m"): 3,
        ("disaggregation_decisions_total", "m", "long", "yes"): 1,
        ("handover_legs_total", "prefill", "m", "done"): 1,
        ("handover_legs_total", "prefill", "m", "failed"): 1,
        ("handover_legs_total", "decode", "m", "done"): 1,
        ("handover_seconds_count", "m"): 1,
        ("handover_bytes_total", "m"): 1000,
        ("handover_bandwidth_bytes_per_second_sum", "m"): 2000,
        ("handover_cancel_seconds_sum", "m"): 0.25,
        ("migrations_total", "m", "lost"): 1,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_dropped_connections_begin_at_zero() -> None:
    """A rate does not see a series that begins at 1."""
    metrics = FrontendMetrics()
    metrics.connection_dropped("full")
    page = metrics.render().decode()
    assert 'commutator_connections_dropped_total{reason="full"} 1.0' in page
    assert 'commutator_connections_dropped_total{reason="headers_too_long"} 0.0' in page

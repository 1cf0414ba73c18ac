"""What routing knows of its workers' KV events, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from commutator import __version__
from commutator.contract.worker import Role
from commutator.kv_events.sequence import SequenceCounters
from commutator.metrics.frontend import FrontendMetrics
from commutator.metrics.readings import Readings
from commutator.routing.prefix_index.health import Cause, EventWarning
from commutator.routing.prefix_index.indexer import WorkerEvents
from commutator.routing.workers import WorkerStatus

EVENTS = WorkerEvents(
    messages=40,
    decode_errors=1,
    sources=(
        SequenceCounters(
            gaps=2, lost=3, replays=4, replays_failed=5, restarts=6, resyncs=7, interruptions=8
        ),
        SequenceCounters(
            gaps=10,
            lost=10,
            replays=10,
            replays_failed=10,
            restarts=10,
            resyncs=10,
            interruptions=10,
        ),
    ),
    blocks=(100, 20, 3, 0),
)


def samples(metrics: FrontendMetrics) -> dict[tuple[str, ...], float]:
    """By name, less what all have in common, worker, and the other label's value."""
    return {
        (sample.name.removeprefix("commutator_router_"), worker, *sample.labels.values()): (
            sample.value
        )
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if (worker := sample.labels.pop("worker", "")) != ""
    }


def test_every_counter_is_scraped_under_its_worker() -> None:
    metrics = FrontendMetrics(Readings(events=lambda: {"w0": EVENTS}))
    assert samples(metrics) == {
        ("indexed_blocks", "w0", "device"): 100,
        ("indexed_blocks", "w0", "host"): 20,
        ("indexed_blocks", "w0", "disk"): 3,
        ("indexed_blocks", "w0", "external"): 0,
        ("event_messages_total", "w0"): 40,
        ("event_messages_undecodable_total", "w0"): 1,
        ("event_messages_lost_total", "w0"): 13,
        ("event_gaps_total", "w0"): 12,
        ("event_replays_total", "w0"): 14,
        ("event_replays_failed_total", "w0"): 15,
        ("event_resyncs_total", "w0"): 17,
        ("event_engine_restarts_total", "w0"): 16,
        ("event_interruptions_total", "w0"): 18,
    }


def test_a_warning_is_there_for_as_long_as_it_holds() -> None:
    present = [
        EventWarning("w0", Cause.NO_SOURCE, "one router's words"),
        EventWarning("w0", Cause.NO_SOURCE, "those of another, for prefills"),
        EventWarning("w1", Cause.LOST, "..."),
    ]
    metrics = FrontendMetrics(Readings(warnings=lambda: present))
    assert samples(metrics) == {
        ("event_warnings", "w0", "no_source"): 1,
        ("event_warnings", "w1", "lost"): 1,
    }
    present.clear()
    assert samples(metrics) == {}


def test_workers_have_a_state_and_models_are_ready_or_not() -> None:
    worker = WorkerStatus("w-0", "m", "sim", "draining", 1, 3, role=Role.PREFILL)
    metrics = FrontendMetrics(
        Readings(workers=lambda: [worker], models_ready=lambda: {"m": False, "n": True})
    )
    page = metrics.render().decode()
    of_worker = 'model="m",role="prefill"'
    assert f'worker_state{{{of_worker},state="draining",worker="w-0"}} 1.0' in page
    assert f'worker_active_requests{{{of_worker},worker="w-0"}} 3.0' in page
    assert 'commutator_model_ready{model="m"} 0.0' in page
    assert 'commutator_model_ready{model="n"} 1.0' in page
    assert f'commutator_build_info{{version="{__version__}"}} 1.0' in page

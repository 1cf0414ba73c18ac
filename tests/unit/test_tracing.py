"""Spans of requests: one for each leg, all in the client's trace, handed on to the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tests.unit.routing.apart_world import LOST, World

from commutator import tracing
from commutator.config.model import TracingConfig

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"Traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def spans() -> Iterator[Callable[[], dict[str, ReadableSpan]]]:
    """Ends tracing and tells the spans by name, the last of each."""
    exporter = InMemorySpanExporter()
    stop = tracing.start(TracingConfig(endpoint="http://nowhere"), exporter)

    def ended() -> dict[str, ReadableSpan]:
        stop()
        return {span.name: span for span in exporter.get_finished_spans()}

    yield ended
    stop()


async def test_both_legs_are_in_the_clients_trace(
    spans: Callable[[], dict[str, ReadableSpan]],
) -> None:
    world = World()
    prefill, decode = await world.up("p-0"), await world.up("d-0")
    await tracing.in_span("completion", HEADERS, {"http.route": "/v1/completions"}, world.run())
    found = spans()
    assert set(found) == {"completion", "prefill", "decode"}
    for span in found.values():
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE
    root = found["completion"]
    assert root.parent is not None
    assert root.context is not None
    assert f"{root.parent.span_id:016x}" == PARENT
    for name, worker in (("prefill", prefill), ("decode", decode)):
        leg = found[name]
        assert leg.parent is not None
        assert leg.context is not None
        assert leg.attributes is not None
        assert leg.parent.span_id == root.context.span_id
        assert leg.attributes["commutator.worker_id"] == worker.name
        handed_on = worker.asked[0].traceparent
        assert handed_on == f"00-{TRACE}-{leg.context.span_id:016x}-01"
        assert leg.status.status_code is not StatusCode.ERROR
    assert [event.name for event in found["decode"].events] == ["first token"]


async def test_a_failed_leg_says_why(spans: Callable[[], dict[str, ReadableSpan]]) -> None:
    world = World()
    await world.up("p-0", troubles=[LOST])
    await world.up("d-0")
    await tracing.in_span("completion", {}, {}, world.run())
    prefill = spans()["prefill"]
    assert prefill.status.status_code is StatusCode.ERROR
    assert prefill.status.description == "EngineUnavailableError: connection reset"
    await world.dispatcher.close()


async def test_a_client_may_refuse(spans: Callable[[], dict[str, ReadableSpan]]) -> None:
    world = World()
    await world.up("d-0")
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    await tracing.in_span("completion", headers, {}, world.run())
    assert not spans()


async def test_without_tracing_nothing_is_handed_on() -> None:
    world = World()
    decode = await world.up("d-0")
    await world.run()
    assert decode.asked[0].traceparent is None


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing.missing_package() is None
    monkeypatch.setattr(tracing, "_NEEDED", ("json", "no_such.package"))
    assert tracing.missing_package() == "no_such.package"

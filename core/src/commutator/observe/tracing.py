"""OpenTelemetry spans of requests and of their legs at workers; nothing until ``start`` is called.

Needs ``pip install commutator[tracing]``. A request goes on with its client's W3C ``traceparent``;
each leg's own is handed on with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

from commutator.config.model import TracingConfig

__all__ = ["DISTRIBUTIONS", "LegSpan", "begin_leg", "missing_package", "start", "traced"]

ResultT = TypeVar("ResultT")
DISTRIBUTIONS = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")

_tracer: Any = None
"""Of this process; None: nothing is traced."""


def missing_package() -> str | None:
    """What tracing needs and is not installed."""
    for name in _NEEDED:
        try:
            found = find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return name
    return None


def start(config: TracingConfig, exporter: Any = None) -> Callable[[], None]:
    """Trace from now on. Returns what sends the last spans and ends it; that may take seconds.

    ``exporter`` takes the place of the one that posts to ``config.endpoint``.
    """
    global _tracer  # noqa: PLW0603 - one for the process, like the registry of a logger
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.sampling import (  # noqa: PLC0415
        ParentBased,
        TraceIdRatioBased,
    )

    provider = TracerProvider(
        resource=Resource.create({"service.name": config.service_name}),
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(
        BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=config.endpoint))
    )
    _tracer = provider.get_tracer("commutator")

    def stop() -> None:
        global _tracer  # noqa: PLW0603
        _tracer = None
        provider.shutdown()

    return stop


def traced(
    name: str, headers: Mapping[str, str], attributes: Mapping[str, str], answer: Awaitable[ResultT]
) -> Awaitable[ResultT]:
    """``answer`` inside of a span that goes on with the client's trace, if anything is traced."""
    return answer if _tracer is None else _in_span(name, headers, attributes, answer)


async def _in_span(
    name: str, headers: Mapping[str, str], attributes: Mapping[str, str], answer: Awaitable[ResultT]
) -> ResultT:
    from opentelemetry.propagate import extract  # noqa: PLC0415
    from opentelemetry.trace import SpanKind  # noqa: PLC0415

    carrier = {key.lower(): value for key, value in headers.items()}
    with _tracer.start_as_current_span(
        name, context=extract(carrier), kind=SpanKind.SERVER, attributes=attributes
    ):
        return await answer


class LegSpan:
    """A request's time at one worker. Ended once; what comes later is not heard."""

    def __init__(self, span: Any) -> None:
        self._span = span

    @property
    def traceparent(self) -> str | None:
        """For whoever serves the leg."""
        from opentelemetry.propagate import inject  # noqa: PLC0415
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        carrier: dict[str, str] = {}
        inject(carrier, set_span_in_context(self._span))
        return carrier.get("traceparent")

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def set(self, name: str, value: str | int) -> None:
        self._span.set_attribute(name, value)

    def end(self, error: BaseException | None = None) -> None:
        if error is not None:
            from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415

            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        self._span.end()


def begin_leg(phase: str, worker_id: str, request_id: str, prompt_tokens: int) -> LegSpan | None:
    """A child of the request's span; None when nothing is traced."""
    if _tracer is None:
        return None
    attributes = {
        "commutator.worker_id": worker_id,
        "commutator.request_id": request_id,
        "gen_ai.usage.input_tokens": prompt_tokens,
    }
    return LegSpan(_tracer.start_span(phase, attributes=attributes))

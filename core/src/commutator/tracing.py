"""OpenTelemetry spans of requests and of their time at each worker, after ``start``.

Needs ``pip install commutator[tracing]``. A request continues the trace of its client's W3C
``traceparent``; each worker receives the ``traceparent`` of its own span.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

from commutator.config.model import TracingConfig

ResultT = TypeVar("ResultT")

DISTRIBUTIONS = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")

tracer: Any = None
"""The tracer of this process; None while tracing is off: then nothing else here is to be called."""


def missing_package() -> str | None:
    """The first package that tracing needs and that is not installed."""
    for name in _NEEDED:
        try:
            found = find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return name
    return None


def start(config: TracingConfig, exporter: Any = None) -> Callable[[], None]:
    """Start tracing. Returns a function that sends the last spans and stops; it may take seconds.

    ``exporter`` replaces the one that posts to ``config.endpoint``.
    """
    global tracer  # noqa: PLW0603 - one for the process, like the registry of a logger
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    provider = TracerProvider(
        resource=Resource.create({"service.name": config.service_name}),
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(
        BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=config.endpoint))
    )
    tracer = provider.get_tracer("commutator")

    def stop() -> None:
        global tracer  # noqa: PLW0603
        tracer = None
        provider.shutdown()

    return stop


async def in_span(
    name: str, headers: Mapping[str, str], attributes: Mapping[str, str], answer: Awaitable[ResultT]
) -> ResultT:
    """``answer``, inside a span of the client's trace."""
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind

    carrier = {key.lower(): value for key, value in headers.items()}
    with tracer.start_as_current_span(
        name, context=extract(carrier), kind=SpanKind.SERVER, attributes=attributes
    ):
        return await answer


class WorkerSpan:
    """The span of a request's time at one worker. Calls after ``end`` have no effect."""

    def __init__(self, span: Any) -> None:
        self._span = span

    @property
    def traceparent(self) -> str | None:
        """The W3C header for the engine."""
        from opentelemetry.propagate import inject
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        inject(carrier, set_span_in_context(self._span))
        return carrier.get("traceparent")

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def end(self, error: BaseException | None = None) -> None:
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        self._span.end()


def worker_span(phase: str, worker_id: str, request_id: str, prompt_tokens: int) -> WorkerSpan:
    """A child of the request's span."""
    attributes = {
        "commutator.worker_id": worker_id,
        "commutator.request_id": request_id,
        "gen_ai.usage.input_tokens": prompt_tokens,
    }
    return WorkerSpan(tracer.start_span(phase, attributes=attributes))

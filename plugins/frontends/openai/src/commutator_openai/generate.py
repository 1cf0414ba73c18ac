"""The handlers of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from aiohttp import web

from commutator.errors import RequestError
from commutator.frontend import (
    Batch,
    FrontendServices,
    Generation,
    Plan,
    WorkPool,
    traced,
)
from commutator_openai.answers import send_json
from commutator_openai.body import NOT_SERVED, read_request
from commutator_openai.middleware import (
    EXCHANGE,
    Exchange,
    caller,
    explain_routing,
    name_workers,
    time_limit,
)
from commutator_openai.pass_through import pass_through_if
from commutator_openai.planning import Target, plan_chat, plan_completion
from commutator_openai.protocol.chunks import ChatShape, CompletionShape, Shape, WholeAnswer, event
from commutator_openai.protocol.fields import Hint, hints_given
from commutator_openai.protocol.requests import ChatRequest, CompletionRequest, GenerationRequest

__all__ = [
    "IGNORED_HEADER",
    "STRICT",
    "EventStream",
    "chat_completions",
    "completions",
]

STRICT: web.AppKey[bool] = web.AppKey("strict", bool)
"""Whether parameters without effect are refused."""

IGNORED_HEADER = "X-Commutator-Ignored"
"""Names the parameters that had no effect on the answer."""

RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest)

_INLINE_BYTES = 1 << 20
_INLINE_LOGPROBS = 32
"""Each takes some microseconds to encode, with 20 alternatives some tens."""


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    serving = _serve(request, ChatRequest, plan_chat, ChatShape)
    return await traced("chat", request.headers, {"http.route": request.path}, serving)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    serving = _serve(request, CompletionRequest, plan_completion, CompletionShape)
    return await traced("completion", request.headers, {"http.route": request.path}, serving)


def _session_id(body: GenerationRequest) -> str | None:
    return body.session_id or getattr(body, "prompt_cache_key", None)


def _include_usage(body: GenerationRequest) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


async def _serve(
    request: web.Request,
    cls: type[RequestT],
    make_plan: Callable[[RequestT, Target], Awaitable[Plan]],
    shape_class: type[Shape],
) -> web.StreamResponse:
    exchange = request[EXCHANGE]
    services = exchange.services
    stream = EventStream(request)
    limit = time_limit(request)
    async with limit:
        try:
            body = await read_request(request, cls)
        except RequestError as refused:
            if (answer := await pass_through_if(request, refused)) is not None:
                return answer
            raise
        if given := hints_given(body):
            if (answer := await _pass_on_hints(request, given)) is not None:
                return answer
            exchange.headers[IGNORED_HEADER] = ", ".join(given)
        name, text = services.text_model(body.model, exchange.principal)
        exchange.model = name
        exchange.user = _label(body)
        sender = caller(request, user=body.user, session_id=_session_id(body))
        async with services.limiter.of(sender):
            target = Target(
                model=name,
                text=text,
                prompts=services.preprocessors[name],
                max_model_len=services.max_model_len(name, exchange.principal),
                request_id=exchange.request_id,
                principal=exchange.principal,
                caller=sender,
            )
            plan = await make_plan(body, target)
            shape = shape_class(
                exchange.request_id,
                plan,
                include_usage=_include_usage(body),
                logprobs=body.logprobs,
            )
            if exchange.counts:
                exchange.ticket = await services.request_limiter.admit(
                    exchange.principal, plan.prompt_tokens, len(plan.requests), _stated(body, plan)
                )
            async with Generation(
                services.dispatcher,
                services.metrics,
                plan,
                services.logprobs,
                exchange.arrived_s,
                limit.deadline_s,
            ) as generation:
                try:
                    if body.stream:
                        note = partial(_note_routing, request, exchange, generation)
                        exchange.generating = True
                        await _stream(generation, shape, stream, note, services.work)
                        return stream.response
                    parts = await _collect(generation, shape, services.work)
                finally:
                    exchange.generating = False
                    if not stream.started:
                        _note_routing(request, exchange, generation)
                    _account(services, exchange, generation)
                return await send_json(request, parts)


async def _pass_on_hints(
    request: web.Request, given: Mapping[str, Hint]
) -> web.StreamResponse | None:
    """The answer of an engine that may know the hints; None to ignore them.

    Raises RequestError where they are not to be ignored.
    """
    name, hint = next(iter(given.items()))
    refused = RequestError(
        f"{name} is not supported, because {hint.why}. Remove it.", name, NOT_SERVED
    )
    strict = request.app[STRICT]
    if strict or any(hint.for_engines for hint in given.values()):
        if (answer := await pass_through_if(request, refused)) is not None:
            return answer
        if strict:
            raise refused
    return None


async def _collect(generation: Generation, shape: Shape, work: WorkPool) -> list[bytes]:
    """The whole answer, as JSON in parts.

    Log probabilities become JSON as they come: as objects they would be millions, which keep the
    garbage collector busy and take long to free.
    """
    answers = [WholeAnswer() for _ in generation.choices]

    def add(batch: Batch) -> None:
        for number, piece in batch:
            answers[number].add(piece, shape.logprob_lists(piece))

    async with aclosing(generation.batches()) as batches:
        async for batch in batches:
            generation.keep(batch)
            if _takes_long(shape, batch):
                await work.run(partial(add, batch), refusable=False)
            else:
                add(batch)
    usage = generation.usage()
    if sum(answer.size_bytes for answer in answers) <= _INLINE_BYTES:
        return [*shape.answer(answers, usage)]

    def taken() -> Iterator[WholeAnswer]:
        """Each answer is given up once it is encoded."""
        answers.reverse()
        while answers:
            yield answers.pop()

    def encoded() -> Generator[None, None, list[bytes]]:
        parts = []
        for part in shape.answer(taken(), usage):
            parts.append(part)
            yield
        return parts

    return await work.run_in_steps(encoded(), refusable=False)


async def _stream(
    generation: Generation,
    shape: Shape,
    stream: EventStream,
    note: Callable[[], None],
    work: WorkPool,
) -> None:
    """``note`` completes the headers, right before they are sent."""
    unfinished = len(generation.choices)
    begun: set[int] = set()

    def events(batch: Batch) -> bytes:
        nonlocal unfinished
        chunks = []
        for number, piece in batch:
            if number not in begun:
                begun.add(number)
                chunks.append(shape.first(number))
            if piece.text or piece.logprobs:
                chunks.append(shape.content(number, piece))
            if piece.finish_reason is not None:
                unfinished -= 1
                chunks.append(shape.finish(number, piece.finish_reason))
        return b"".join(chunks)

    async with aclosing(generation.batches()) as batches:
        async for batch in batches:
            if not begun:
                note()
            if _takes_long(shape, batch):
                data = await work.run(partial(events, batch), refusable=False)
            else:
                data = events(batch)
            if unfinished:
                await stream.write(data)
            else:
                usage = shape.usage(generation.usage()) if shape.include_usage else b""
                await stream.finish(data + usage)


def _takes_long(shape: Shape, batch: Batch) -> bool:
    """Whether log probabilities keep the event loop from other requests."""
    if not shape.logprobs:
        return False
    return sum(len(piece.logprobs) for _, piece in batch) > _INLINE_LOGPROBS


def _note_routing(request: web.Request, exchange: Exchange, generation: Generation) -> None:
    """Name the workers in the headers, and explain the choice if the client asked for it."""
    workers = exchange.workers = generation.worker_ids
    name_workers(exchange, workers)
    explain_routing(request, lambda: generation.explanations)


def _account(services: FrontendServices, exchange: Exchange, generation: Generation) -> None:
    usage = generation.usage()
    exchange.workers = generation.worker_ids
    exchange.used(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    exchange.ttft_s = generation.times[0].ttft_s
    services.metrics.tokens_used(
        exchange.model, exchange.prompt_tokens, exchange.cached_tokens, exchange.generated_tokens
    )


def _stated(body: GenerationRequest, plan: Plan) -> int | None:
    """The longest answer, unless the client of a chat left it to the model."""
    if (
        body.max_tokens is None
        and isinstance(body, ChatRequest)
        and body.max_completion_tokens is None
    ):
        return None
    return plan.requests[0].sampling.max_tokens


def _label(body: GenerationRequest) -> str | None:
    other = body.safety_identifier if isinstance(body, ChatRequest) else None
    return body.user if body.user is not None else other


_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # makes nginx forward events at once
}


class _Response(web.StreamResponse):
    # The first event follows its headers at once: one packet, as with aiohttp's own web.Response.
    _send_headers_immediately = False


class EventStream:
    """A response of server-sent events. Its headers are sent with the first events.

    An error before that can still be answered with its own status; after it,
    ``commutator_openai.middleware`` ends the stream.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse = _Response(headers=_HEADERS)

    @property
    def started(self) -> bool:
        return self.response.prepared

    async def write(self, events: bytes) -> None:
        """Send events, all in one write."""
        if events:
            await self._start()
            await self.response.write(events)

    async def finish(self, events: bytes) -> None:
        """Send the last events and the end mark, all in one write."""
        await self._start()
        await self._request[EXCHANGE].end(self.response, events + event(b"[DONE]"))

    async def _start(self) -> None:
        if not self.started:
            await self.response.prepare(self._request)

"""The handlers of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from aiohttp import web

from commutator.errors import RequestError
from commutator.frontend.body import read_request
from commutator.frontend.chat import ChatShape
from commutator.frontend.choice import Piece
from commutator.frontend.completions import CompletionShape
from commutator.frontend.deadline import timeout_of
from commutator.frontend.decision_header import tell_decision
from commutator.frontend.exchange import EXCHANGE, Exchange
from commutator.frontend.generation import Generation
from commutator.frontend.pass_through import pass_through_if
from commutator.frontend.plan import Plan, plan_chat, plan_completion
from commutator.frontend.requests import ChatRequest, CompletionRequest, GenerationRequest
from commutator.frontend.services import Services
from commutator.frontend.shape import Shape, encode
from commutator.frontend.sse import EventStream
from commutator.observe.tracing import traced
from commutator.text.model import TextModel
from commutator.text.prefix_cache import PrefixCache

__all__ = ["chat_completions", "completions"]

RequestT = TypeVar("RequestT", bound=GenerationRequest)
Planner = Callable[[RequestT, str, TextModel, PrefixCache, int, str], Awaitable[Plan]]
Shaper = Callable[[RequestT, Plan, str], Shape]


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    serving = _serve(request, ChatRequest, plan_chat, _chat_shape)
    return await traced("chat", request.headers, {"http.route": request.path}, serving)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    serving = _serve(request, CompletionRequest, plan_completion, _completion_shape)
    return await traced("completion", request.headers, {"http.route": request.path}, serving)


def _chat_shape(body: ChatRequest, plan: Plan, request_id: str) -> Shape:
    return ChatShape(
        request_id,
        plan.model,
        plan.text,
        include_usage=_include_usage(body),
        logprobs=bool(body.logprobs),
    )


def _completion_shape(body: CompletionRequest, plan: Plan, request_id: str) -> Shape:
    return CompletionShape(
        request_id, plan, include_usage=_include_usage(body), logprobs=body.logprobs
    )


def _include_usage(body: GenerationRequest) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


async def _serve(
    request: web.Request,
    cls: type[RequestT],
    make_plan: Planner[RequestT],
    shaper: Shaper[RequestT],
) -> web.StreamResponse:
    exchange = request[EXCHANGE]
    services = exchange.services
    stream = EventStream(request)
    limit = services.time_limits.of(timeout_of(request, services.config.request_timeout_s))
    async with limit:
        try:
            body = await read_request(request, cls)
        except RequestError as refused:
            if (answer := await pass_through_if(request, refused)) is not None:
                return answer
            raise
        name, text = services.text_model(body.model)
        exchange.model = name
        exchange.user = _label(body)
        async with services.limiter:
            longest = services.max_model_len(name)
            cache = services.prompt_caches[name]
            plan = await make_plan(body, name, text, cache, longest, exchange.request_id)
            shape = shaper(body, plan, exchange.request_id)
            async with Generation(
                services.dispatcher,
                services.metrics,
                plan,
                exchange.arrived_s,
                limit.deadline_s,
            ) as generation:
                try:
                    if body.stream:
                        tell = partial(_tell_routing, request, exchange, generation)
                        await _stream(generation, shape, stream, tell)
                        return stream.response
                    return await _collect(generation, shape)
                finally:
                    if not stream.started:
                        _tell_routing(request, exchange, generation)
                    _account(services, exchange, generation)


async def _collect(generation: Generation, shape: Shape) -> web.Response:
    pieces: list[list[Piece]] = [[] for _ in generation.choices]
    async with aclosing(generation.batches()) as batches:
        async for batch in batches:
            for number, piece in batch:
                pieces[number].append(piece)
    answer = shape.answer(pieces, generation.usage())
    return web.Response(body=encode(answer), content_type="application/json")


async def _stream(
    generation: Generation, shape: Shape, stream: EventStream, tell: Callable[[], None]
) -> None:
    """``tell`` completes the headers, right before they are sent."""
    unfinished = len(generation.choices)
    begun: set[int] = set()
    async with aclosing(generation.batches()) as batches:
        async for batch in batches:
            chunks = []
            if not begun:
                tell()
            for number, piece in batch:
                if number not in begun:
                    begun.add(number)
                    chunks.append(shape.first(number))
                if piece.text or piece.logprobs:
                    chunks.append(shape.content(number, piece))
                if piece.finish_reason is not None:
                    unfinished -= 1
                    chunks.append(shape.finish(number, piece.finish_reason))
            if unfinished == 0:
                if shape.include_usage:
                    chunks.append(shape.usage(generation.usage()))
                await stream.finish(b"".join(chunks))
            else:
                await stream.write(b"".join(chunks))


def _tell_routing(request: web.Request, exchange: Exchange, generation: Generation) -> None:
    """Put into the headers who serves the request, and why if that was asked for."""
    workers = exchange.workers = generation.worker_ids
    exchange.headers["X-Commutator-Worker"] = ",".join(workers)
    tell_decision(request, lambda: generation.explanations)


def _account(services: Services, exchange: Exchange, generation: Generation) -> None:
    usage = generation.usage()
    exchange.workers = generation.worker_ids
    exchange.prompt_tokens = usage.prompt_tokens
    exchange.cached_tokens = usage.prompt_tokens_details.cached_tokens
    exchange.generated_tokens = usage.completion_tokens
    exchange.ttft_s = generation.times[0].ttft_s
    services.metrics.tokens_used(
        exchange.model, exchange.prompt_tokens, exchange.cached_tokens, exchange.generated_tokens
    )


def _label(body: GenerationRequest) -> str | None:
    other = body.safety_identifier if isinstance(body, ChatRequest) else None
    return body.user if body.user is not None else other

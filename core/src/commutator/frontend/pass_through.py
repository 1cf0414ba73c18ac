"""Requests for what only the engine itself can do: its worker gets them as they came.

Tools, structured output, pictures, embeddings: what the front door knows of, but does not serve, is
the engine's own business where the engine takes OpenAI requests. Only ``model`` is changed, to what
the worker calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from commutator.errors import RequestError
from commutator.frontend.body import off_loop, read_object
from commutator.frontend.deadline import timeout_of
from commutator.frontend.decision_header import tell_decision
from commutator.frontend.exchange import EXCHANGE
from commutator.frontend.fields import MAX_INT
from commutator.frontend.parse import NOT_SERVED
from commutator.frontend.services import SERVICES, ForwardedRequest, Services
from commutator.text.model import TextModel
from commutator.types import GenerateRequest, SamplingParams

__all__ = ["ENDPOINTS", "engine_only", "pass_through", "pass_through_if"]

ENDPOINTS = ("/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/score")
"""Served by passing through, and not otherwise."""


async def engine_only(request: web.Request) -> web.StreamResponse:
    """The handler of ``ENDPOINTS``."""
    services = request.app[SERVICES]
    limit_s = timeout_of(request, services.config.request_timeout_s)
    async with services.time_limits.of(limit_s):
        body = await read_object(request)
        given = body.get("model")
        if not isinstance(given, str | None):
            raise RequestError("model: expected a string", "model")
        name, _ = services.text_model(given)
        request[EXCHANGE].model = name
        if not services.dispatcher.forwards(name):
            raise RequestError(
                f"{request.path} is not served here, and no worker of {name} does it by itself",
                code="unsupported_endpoint",
            )
        async with services.limiter:
            return await pass_through(request, name, body)


async def pass_through_if(request: web.Request, refused: RequestError) -> web.StreamResponse | None:
    """Pass it through if what ``refused`` is about is the engine's business, and it takes it."""
    if refused.code != NOT_SERVED:
        return None
    services = request.app[SERVICES]
    body = await read_object(request)
    name = str(body.get("model"))
    if name not in services.models or not services.dispatcher.forwards(name):
        return None
    request[EXCHANGE].model = name
    async with services.limiter:
        return await pass_through(request, name, body)


async def pass_through(
    request: web.Request, model: str, body: dict[str, Any]
) -> web.StreamResponse:
    """The worker's answer, whatever it is."""
    services, exchange = request.app[SERVICES], request[EXCHANGE]
    token_ids = await _known_tokens(services, model, body)
    salt = body.get("cache_salt")
    by = GenerateRequest(
        exchange.request_id,
        token_ids,
        SamplingParams(max_tokens=1),
        cache_salt=salt if isinstance(salt, str) else None,
        priority=_priority(body),
    )
    async with await services.dispatcher.forward(model, by, _session_id(body)) as forward:
        exchange.workers = (forward.worker_id,)
        exchange.headers["X-Commutator-Worker"] = forward.worker_id
        services.metrics.routed(model, forward.facts)
        tell_decision(request, lambda: [forward.explain()])
        return await _relay(request, forward, body)


async def _relay(
    request: web.Request, forward: ForwardedRequest, body: dict[str, Any]
) -> web.StreamResponse:
    exchange, data = request[EXCHANGE], await request.read()
    if body.get("model") != forward.model:
        renamed = {**body, "model": forward.model}
        data = await off_loop(len(data), partial(msgspec.json.encode, renamed))
    headers = {"X-Request-Id": exchange.request_id}
    answer = await forward.send(request.path, data, headers)
    response = web.StreamResponse(
        status=answer.status, headers={"Content-Type": answer.content_type}
    )
    await response.prepare(request)
    async for chunk in forward.chunks():
        await response.write(chunk)
    exchange.ended = True
    await response.write_eof()
    return response


def _priority(body: Mapping[str, Any]) -> int:
    given = body.get("priority")
    # Not isinstance: True is an int, too.
    return given if type(given) is int and abs(given) <= MAX_INT else 0


def _session_id(body: Mapping[str, Any]) -> str | None:
    given = (body.get("session_id"), body.get("prompt_cache_key"))
    return next((name for name in given if name and isinstance(name, str)), None)


async def _known_tokens(services: Services, model: str, body: Mapping[str, Any]) -> Sequence[int]:
    """What the engine will make of the prompt, if it can be told: then a prefix is found.

    Of what cannot be rendered here nothing is known, and it is routed by load.
    """
    text = services.models[model]
    if services.dispatcher.hashed_block_size(model) is None:
        return []
    prompt = body.get("prompt")
    try:
        if isinstance(prompt, str):
            return await asyncio.to_thread(text.encode, prompt)
        return await asyncio.to_thread(_render, text, body)
    except (RequestError, TypeError, KeyError, AttributeError):
        return []


def _render(text: TextModel, body: Mapping[str, Any]) -> list[int]:
    variables = {"tools": body.get("tools") or None, **(body.get("chat_template_kwargs") or {})}
    messages = body["messages"]
    if not all(isinstance(message["content"], str) for message in messages):
        return []
    rendered = text.render_chat(messages, variables=variables)
    return text.encode(rendered, add_special_tokens=False)

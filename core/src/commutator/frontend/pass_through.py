"""Requests for what only the engine itself can do: its worker gets them as they came.

Tools, structured output, pictures, embeddings: what the front door knows of, but does not serve, is
the engine's own business where the engine takes OpenAI requests. Only ``model`` is changed, to what
the worker calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from commutator.errors import EngineError, RequestError
from commutator.frontend.deadline import TimeLimit, timeout_of
from commutator.frontend.decision_header import tell_decision
from commutator.frontend.errors import log_failure, to_http_error
from commutator.frontend.exchange import EXCHANGE
from commutator.frontend.parse import NOT_SERVED
from commutator.frontend.services import SERVICES, ForwardedRequest, Services
from commutator.frontend.shape import event
from commutator.text.model import TextModel
from commutator.types import GenerateRequest, SamplingParams

__all__ = ["ENDPOINTS", "engine_only", "pass_through", "pass_through_if"]

ENDPOINTS = ("/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/score")
"""Served by passing through, and not otherwise."""


async def engine_only(request: web.Request) -> web.StreamResponse:
    """The handler of ``ENDPOINTS``."""
    services = request.app[SERVICES]
    body = _decode(await request.read())
    given = body.get("model")
    name, _ = services.text_model(None if given is None else str(given))
    request[EXCHANGE].model = name
    if not services.dispatcher.forwards(name):
        raise RequestError(
            f"{request.path} is not served here, and no worker of {name} does it by itself",
            code="unsupported_endpoint",
        )
    limit_s = timeout_of(request, services.config.request_timeout_s)
    async with TimeLimit(limit_s), services.limiter:
        return await pass_through(request, name, body)


async def pass_through_if(request: web.Request, refused: RequestError) -> web.StreamResponse | None:
    """Pass it through if what ``refused`` is about is the engine's business, and it takes it."""
    if refused.code != NOT_SERVED:
        return None
    services = request.app[SERVICES]
    body = _decode(await request.read())
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
    priority, salt = body.get("priority"), body.get("cache_salt")
    by = GenerateRequest(
        exchange.request_id,
        token_ids,
        SamplingParams(max_tokens=1),
        cache_salt=salt if isinstance(salt, str) else None,
        priority=priority if isinstance(priority, int) else 0,
    )
    session_id = body.get("session_id") or body.get("prompt_cache_key")
    async with await services.dispatcher.forward(model, by, session_id) as forward:
        exchange.workers = (forward.worker_id,)
        exchange.headers["X-Commutator-Worker"] = forward.worker_id
        services.metrics.routed(model, forward.facts)
        tell_decision(request, lambda: [forward.explain()])
        return await _relay(request, forward, body)


async def _relay(
    request: web.Request, forward: ForwardedRequest, body: dict[str, Any]
) -> web.StreamResponse:
    data = await request.read()
    if body.get("model") != forward.model:
        data = msgspec.json.encode({**body, "model": forward.model})
    headers = {"X-Request-Id": request[EXCHANGE].request_id}
    answer = await forward.send(request.path, data, headers)
    response = web.StreamResponse(
        status=answer.status, headers={"Content-Type": answer.content_type}
    )
    await response.prepare(request)
    try:
        async for chunk in forward.chunks():
            await response.write(chunk)
    except EngineError as error:
        await _break_off(request, response, error)
    else:
        await response.write_eof()
    return response


async def _break_off(
    request: web.Request, response: web.StreamResponse, error: EngineError
) -> None:
    """The status is sent already: a stream ends with an error event, all else without its end."""
    exchange = request[EXCHANGE]
    answer = to_http_error(error, exchange.request_id)
    log_failure(error, answer, exchange.request_id)
    exchange.failed_code = answer.status
    if response.headers["Content-Type"].startswith("text/event-stream"):
        await response.write_eof(event(answer.body()))
    elif request.transport is not None:
        request.transport.close()


def _decode(data: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return body


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

"""Passes requests that only the engine can serve to a worker.

The front door does not serve tools, structured output, pictures or embeddings. An engine that takes
OpenAI requests gets them unchanged but for ``model``, which becomes the worker's name of it. Keys
that the front door does not know are refused, because engines have keys that no client may use: KV
transfers to any address, templates, ids of other requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from commutator import GenerateRequest, SamplingParams
from commutator.contract.principal import ANONYMOUS, Principal
from commutator.errors import RequestError
from commutator.frontend import (
    Forward,
    FrontendServices,
    allowed_priority,
    check_answers,
    salted,
    size_of,
)
from commutator.tokenizer import TextModel
from commutator_openai.answers import write_in_parts
from commutator_openai.body import NOT_SERVED, off_loop, read_object
from commutator_openai.media import check_media
from commutator_openai.metering import AnswerUsage, stated_answers
from commutator_openai.middleware import (
    EXCHANGE,
    SERVICES,
    caller,
    explain_routing,
    name_workers,
    time_limit,
)
from commutator_openai.protocol.fields import MAX_INT, MAX_LABEL

__all__ = [
    "ENDPOINTS",
    "MEDIA_HOSTS",
    "engine_only",
    "pass_through",
    "pass_through_if",
]

_COMMON = frozenset({
    "model", "user", "priority", "session_id", "prompt_cache_key", "safety_identifier",
    "cache_salt", "truncate_prompt_tokens",
})  # fmt: skip

ENDPOINTS: Mapping[str, frozenset[str]] = {
    "/v1/embeddings": _COMMON | {"input", "messages", "encoding_format", "dimensions"},
    "/v1/responses": _COMMON | {
        "include", "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata",
        "parallel_tool_calls", "reasoning", "service_tier", "store", "stream", "stream_options",
        "temperature", "text", "tool_choice", "tools", "top_k", "top_logprobs", "top_p",
        "truncation",
    },
    "/v1/rerank": _COMMON | {
        "documents", "max_tokens_per_doc", "query", "return_documents", "top_n",
    },
    "/v1/score": _COMMON | {
        "apply_softmax", "documents", "item_first", "items", "label_token_ids", "queries", "query",
        "text_1", "text_2",
    },
}  # fmt: skip
"""The paths that are only passed through, and the keys that a client may send to each."""

MEDIA_HOSTS: web.AppKey[frozenset[str]] = web.AppKey("media_hosts", frozenset)
"""The hosts from which engines may fetch what requests name."""

_CHARACTERS_A_TOKEN = 4
"""By which a prompt is estimated that is not tokenized here."""

_LABELS = frozenset({
    "user", "session_id", "prompt_cache_key", "safety_identifier", "cache_salt",
})  # fmt: skip

_LENGTHS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
"""Where an answer has a length, the keys that limit it."""

_INTERNAL = ("kv_transfer_params", "ec_transfer_params", "disaggregated_params")
"""What engines say in answers about themselves: addresses, engine ids and block ids."""


async def engine_only(request: web.Request) -> web.StreamResponse:
    """The handler of ``ENDPOINTS``."""
    services = request.app[SERVICES]
    async with time_limit(request):
        body = await read_object(request)
        if unknown := sorted(body.keys() - ENDPOINTS[request.path]):
            raise RequestError(f"{unknown[0]}: unknown key", unknown[0], "unknown_parameter")
        for name in _LABELS & body.keys():
            if isinstance(body[name], str) and len(body[name]) > MAX_LABEL:
                problem = f"expected at most {MAX_LABEL} characters, got {len(body[name])}"
                raise RequestError(f"{name}: {problem}", name)
        given = body.get("model")
        if not isinstance(given, str | None):
            raise RequestError("model: expected a string", "model")
        name, _ = services.text_model(given, request[EXCHANGE].principal)
        request[EXCHANGE].model = name
        if not services.dispatcher.forwards(name):
            raise RequestError(
                f"{name}'s engine does not support {request.path}; vllm and sglang do",
                code="unsupported_endpoint",
            )
        async with services.limiter.of(caller(request, user=None, session_id=None)):
            return await pass_through(request, name, body)


async def pass_through_if(request: web.Request, refused: RequestError) -> web.StreamResponse | None:
    """The engine's answer if it may serve what ``refused`` is about, else None."""
    if refused.code != NOT_SERVED:
        return None
    services = request.app[SERVICES]
    body = await read_object(request)
    name = str(body.get("model"))
    mine = services.models_for(request[EXCHANGE].principal)
    if name not in mine or not services.dispatcher.forwards(name):
        return None
    request[EXCHANGE].model = name
    async with services.limiter.of(caller(request, user=None, session_id=None)):
        return await pass_through(request, name, body)


async def pass_through(
    request: web.Request, model: str, body: dict[str, Any]
) -> web.StreamResponse:
    """The worker's answer, unchanged, to the request as far as its principal has the right."""
    services, exchange = request.app[SERVICES], request[EXCHANGE]
    hosts = request.app[MEDIA_HOSTS]
    await off_loop(request, len(await request.read()), partial(check_media, body, hosts))
    body = _within_rights(exchange.principal, request.path, body)
    token_ids = await _known_tokens(services, exchange.principal, model, body)
    if exchange.principal.limits.max_model_len is not None and request.path in _LENGTHS:
        longest = services.max_model_len(model, exchange.principal)
        body = _within_length(longest, _LENGTHS[request.path], len(token_ids), body)
    salt = body.get("cache_salt")
    by = GenerateRequest(
        request_id=exchange.request_id,
        token_ids=token_ids,
        sampling=SamplingParams(max_tokens=1),
        cache_salt=salt if isinstance(salt, str) else None,
        priority=allowed_priority(
            exchange.principal,
            None if body.get("priority") is None else _priority(exchange.principal, body),
        ),
    )
    prompt_tokens = len(token_ids) or len(await request.read()) // _CHARACTERS_A_TOKEN
    if exchange.counts:
        exchange.ticket = await services.request_limiter.admit(
            exchange.principal, prompt_tokens, *stated_answers(request.path, body)
        )
    user = body.get("user")
    asked = caller(
        request, user=user if isinstance(user, str) else None, session_id=_session_id(body)
    )
    async with await services.dispatcher.forward(model, by, asked) as forward:
        exchange.workers = (forward.worker_id,)
        if by.cache_salt is not None and not forward.keeps_salts_apart:
            raise RequestError(
                "cache_salt: the engine ignores it here, so the prompt would be shared; leave out "
                "what only the engine serves, or use another model",
                "cache_salt",
                NOT_SERVED,
            )
        name_workers(exchange, exchange.workers)
        services.metrics.routed(model, forward.route)
        explain_routing(request, lambda: [forward.explain()])
        return await _relay(request, forward, body, prompt_tokens)


async def _relay(
    request: web.Request, forward: Forward, body: dict[str, Any], prompt_tokens: int
) -> web.StreamResponse:
    """``prompt_tokens``, perhaps an estimate, counts unless the engine says how many it were."""
    exchange, size = request[EXCHANGE], len(await request.read())
    # What was checked is what is sent: parsers differ about a key that is there twice.
    renamed = {**body, "model": forward.model}
    data = await off_loop(request, size, partial(msgspec.json.encode, renamed))
    headers = {"X-Request-Id": exchange.request_id}
    answer = await forward.send(request.path, data, headers)
    response = web.StreamResponse(
        status=answer.status, headers={"Content-Type": answer.content_type}
    )
    refused = answer.status >= web.HTTPBadRequest.status_code
    usage = AnswerUsage(0 if refused else prompt_tokens, answer.content_type)
    exchange.generating = True
    try:
        await response.prepare(request)
        async for part in _without_internals(request, forward.chunks(), answer.content_type):
            await off_loop(request, len(part), partial(usage.take, part))
            await write_in_parts(response, part)
    finally:
        exchange.generating = False
        exchange.used(usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens)
    await exchange.end(response)
    return response


async def _without_internals(
    request: web.Request, chunks: AsyncIterator[bytes], content_type: str
) -> AsyncIterator[bytes]:
    """The answer without the keys of ``_INTERNAL``: event by event, or a JSON object as a whole."""
    if content_type.startswith("text/event-stream"):
        async for lines in _whole_lines(chunks):
            yield b"\n".join(map(_public, lines))
    elif content_type.startswith("application/json"):
        answer = b"".join([chunk async for chunk in chunks])
        yield await off_loop(request, len(answer), partial(_public, answer))
    else:
        async for chunk in chunks:
            yield chunk


async def _whole_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """The lines of a stream as they are completed; the last of each group is empty or the rest."""
    begun: list[bytes] = []  # joined once the line ends, as an event may come in many chunks
    async for chunk in chunks:
        whole, newline, rest = chunk.rpartition(b"\n")
        if newline:
            yield [*b"".join([*begun, whole]).split(b"\n"), b""]
            begun = []
        begun.append(rest)
    if rest := b"".join(begun):
        yield [rest]


def _public(line: bytes) -> bytes:
    if not any(name.encode() in line for name in _INTERNAL):
        return line
    prefix = b"data:" if line.startswith(b"data:") else b""
    try:
        said = msgspec.json.decode(line[len(prefix) :], type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return line  # text that only mentions such a name
    for name in _INTERNAL:
        said.pop(name, None)
    return prefix + (b" " if prefix else b"") + msgspec.json.encode(said)


def _priority(principal: Principal, body: Mapping[str, Any]) -> int:
    """What is no number is 0, but an error where a range holds: an engine may read it as one."""
    given = body.get("priority")
    # Not isinstance: True is an int, too.
    if type(given) is int and abs(given) <= MAX_INT:
        return given
    if principal.priority is not None:
        raise RequestError("priority: expected an integer", "priority")
    return 0


def _session_id(body: Mapping[str, Any]) -> str | None:
    given = (body.get("session_id"), body.get("prompt_cache_key"))
    return next((name for name in given if name and isinstance(name, str)), None)


def _within_rights(principal: Principal, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with the principal's salt. Raises RequestError for what it may not ask for."""
    own, changed = body.get("cache_salt"), dict(body)
    if not isinstance(own, str | None):
        raise RequestError("cache_salt: expected a string", "cache_salt")
    if (salt := salted(principal, own)) is not None:
        changed["cache_salt"] = salt
    answers, prompts = body.get("n"), 1
    match body.get("prompt"):
        case [str() | list(), *_] as several if path == "/v1/completions":
            prompts = len(several)
    check_answers(principal, prompts * (answers if type(answers) is int else 1))
    return changed


def _within_length(
    longest: int, params: Sequence[str], prompt_tokens: int, body: Mapping[str, Any]
) -> dict[str, Any]:
    """The body, whose answer ends where prompt and answer have ``longest`` tokens together.

    Raises RequestError when it asks for more.
    """
    left = longest - prompt_tokens
    given = {param: body[param] for param in params if body.get(param) is not None}
    for param, asked in (given or {params[0]: 1}).items():
        if type(asked) is not int:  # an engine may read it as one
            raise RequestError(f"{param}: expected an integer", param)
        if asked > left:
            raise RequestError(
                f"{param}: prompt and answer may have {longest} tokens together; the prompt has "
                f"{prompt_tokens}, and {asked} more are asked for",
                param,
                "context_length_exceeded",
            )
    return dict(body) if given else {**body, params[0]: left}


async def _known_tokens(
    services: FrontendServices, principal: Principal, model: str, body: Mapping[str, Any]
) -> Sequence[int]:
    """The tokens of the prompt, for routing by prefix and for the limit of its length.

    Empty for a prompt that cannot be rendered here; it is routed by load.
    """
    text = services.models[model]
    limited = principal.limits.max_model_len is not None
    if services.dispatcher.hashed_block_size(model) is None and not limited:
        return []
    prompt, most = body.get("prompt"), services.max_model_len(model, ANONYMOUS)
    prompts = services.preprocessors[model]
    try:
        tokens = await prompts.encode(
            prompt
            if isinstance(prompt, str)
            else await services.work.run(partial(_render, text, body, most)),
            add_special_tokens=isinstance(prompt, str),
            salt=body.get("cache_salt"),
            max_tokens=most,
        )
    except RequestError as error:
        if limited and error.code == "prompt_not_divisible":
            raise  # its length would not be counted
        return []
    except (TypeError, KeyError, AttributeError):
        return []
    return tokens.token_ids


def _render(text: TextModel, body: Mapping[str, Any], most: int) -> str:
    """Empty also for what is certainly longer than ``most`` tokens: the engine will refuse it."""
    if size_of(body) > most * text.longest_token_bytes:
        return ""
    variables = {"tools": body.get("tools") or None, **(body.get("chat_template_kwargs") or {})}
    messages = body["messages"]
    if not all(isinstance(message["content"], str) for message in messages):
        return ""
    return text.render_chat(messages, variables=variables)

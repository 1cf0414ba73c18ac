"""Passes requests that only the engine can serve to a worker.

The front door does not serve pictures, and not all of tools and structured output. An engine that
takes OpenAI requests gets them unchanged but for ``model``, which becomes the worker's name of it.
Keys that the front door does not know are left out or refused, because engines have keys that no
client may use: KV transfers to any address, templates, ids of other requests.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from attrs import frozen

from commutator import GenerateRequest, SamplingParams
from commutator.contract.answer import Failure
from commutator.contract.principal import ANONYMOUS, Principal
from commutator.errors import EngineError, RequestError
from commutator.frontend import (
    NOT_SERVED,
    Call,
    Forward,
    FrontendServices,
    allowed_priority,
    check_answers,
    read_object,
    salted,
    size_of,
)
from commutator.tokenizer import TextModel
from commutator_openai.fields import MAX_INT, MAX_LABEL
from commutator_openai.media import check_media
from commutator_openai.metering import AnswerUsage, stated_answers
from commutator_openai.tolerance import IGNORED_HEADER, for_engine, ignored_header
from commutator_openai.writers import stream_failed

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

log = logging.getLogger(__name__)

_FIRST_ERROR = 400
_FIRST_SERVER_ERROR = 500
_SHOWN_BYTES = 1000
_ERROR_WITHIN = 64
"""An error's event begins with its key, perhaps after its type."""
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


@frozen
class PassThrough:
    """``media_hosts``: the hosts from which engines may fetch what requests name."""

    media_hosts: frozenset[str]

    async def engine_only(self, call: Call) -> None:
        """The handler of ``ENDPOINTS``."""
        async with call.time_limit():
            await self.passed(call, await read_object(call))

    async def passed(self, call: Call, body: dict[str, Any]) -> None:
        """Have the engine answer a body of ``ENDPOINTS``, within a time limit of the caller's."""
        services = call.services
        if unknown := sorted(body.keys() - ENDPOINTS[call.endpoint]):
            raise RequestError(f"{unknown[0]}: unknown key", unknown[0], "unknown_parameter")
        for name in _LABELS & body.keys():
            if isinstance(body[name], str) and len(body[name]) > MAX_LABEL:
                problem = f"expected at most {MAX_LABEL} characters, got {len(body[name])}"
                raise RequestError(f"{name}: {problem}", name)
        given = body.get("model")
        if not isinstance(given, str | None):
            raise RequestError("model: expected a string", "model")
        name, _ = call.text_model(given, _session_id(body))
        call.model = name
        if not services.dispatcher.forwards(name):
            raise RequestError(
                f"{name}'s engine does not support {call.path}; vllm and sglang do",
                code="unsupported_endpoint",
            )
        async with services.limiter.of(call.caller()):
            await call.serve(given, partial(self._pass, call, body))

    async def answered(self, call: Call, refused: RequestError, cls: type[Any]) -> bool:
        """Whether the engine answered, as it may serve what ``refused`` is about.

        It gets the fields of ``cls``, and others that it may know and clients may use.
        """
        if refused.code != NOT_SERVED:
            return False
        services = call.services
        body = await read_object(call)
        given = body.get("model")
        try:
            name, _ = call.text_model(given, _session_id(body))
        except RequestError:
            return False
        if not services.dispatcher.forwards(name):
            return False
        call.model = name
        body, ignored = for_engine(body, cls)
        if ignored:
            call.answer_headers[IGNORED_HEADER] = ignored_header(ignored)
        async with services.limiter.of(call.caller()):
            await call.serve(given, partial(self._pass, call, body))
        return True

    async def _pass(self, call: Call, body: dict[str, Any], model: str, _: TextModel) -> None:
        """The worker's answer, unchanged, to the request as far as its principal has the right."""
        services = call.services
        if call.adapter is not None:
            raise RequestError(f"model: adapter {call.adapter} answers no {call.path}", "model")
        check = partial(check_media, body, self.media_hosts)
        await call.off_loop(len(call.body), check)
        body = _within_rights(call.principal, call.endpoint, body)
        token_ids = await _known_tokens(services, call.principal, model, body)
        if call.principal.limits.max_model_len is not None and call.endpoint in _LENGTHS:
            longest = services.max_model_len(model, call.principal)
            body = _within_length(longest, _LENGTHS[call.endpoint], len(token_ids), body)
        salt = body.get("cache_salt")
        by = GenerateRequest(
            request_id=call.request_id,
            token_ids=token_ids,
            sampling=SamplingParams(max_tokens=1),
            cache_salt=salt if isinstance(salt, str) else None,
            priority=allowed_priority(
                call.principal,
                None if body.get("priority") is None else _priority(call.principal, body),
            ),
        )
        prompt_tokens = len(token_ids) or len(call.body) // _CHARACTERS_A_TOKEN
        if call.counts and call.ticket is None:  # an engine's refusal comes after it
            call.ticket = await services.request_limiter.admit(
                call.principal, prompt_tokens, *stated_answers(call.endpoint, body)
            )
        user = body.get("user")
        asked = call.caller(user if isinstance(user, str) else None, _session_id(body))
        async with await services.dispatcher.forward(model, by, asked) as forward:
            if by.cache_salt is not None and not forward.info.keeps_salts_apart:
                call.workers = (forward.worker_id,)
                raise RequestError(
                    "cache_salt: the engine ignores it here, so the prompt would be shared; leave "
                    "out what only the engine serves, or use another model",
                    "cache_salt",
                    NOT_SERVED,
                )
            services.metrics.routed(model, forward.route)
            call.note_routing((forward.worker_id,), lambda: [forward.route.explain()])
            await _relay(call, forward, body, prompt_tokens)


async def _relay(call: Call, forward: Forward, body: dict[str, Any], prompt_tokens: int) -> None:
    """``prompt_tokens``, perhaps an estimate, counts unless the engine says how many it were."""
    # What was checked is what is sent: parsers differ about a key that is there twice.
    renamed = {**body, "model": forward.info.model}
    data = await call.off_loop(len(call.body), partial(msgspec.json.encode, renamed))
    headers = {"X-Request-Id": call.request_id}
    answer = await forward.send(call.endpoint, data, headers)
    if answer.status >= _FIRST_ERROR:
        call.used(0, 0, 0)
        raise _error_of(answer.status, b"".join([chunk async for chunk in forward.chunks()]))
    usage = AnswerUsage(prompt_tokens, answer.content_type)
    call.generating = call.answering = True
    try:
        streamed = answer.content_type.startswith("text/event-stream")
        failed = stream_failed if streamed else None
        await call.begin(answer.content_type, answer.status, failed=failed)
        await call.write(b"")
        async for part in _without_internals(call, forward.chunks(), answer.content_type):
            await call.off_loop(len(part), partial(usage.take, part))
            await call.write(part)
    finally:
        call.generating = False
        call.used(usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens)
    await call.end()


async def _without_internals(
    call: Call, chunks: AsyncIterator[bytes], content_type: str
) -> AsyncIterator[bytes]:
    """The answer without the keys of ``_INTERNAL``: event by event, or a JSON object as a whole."""
    if content_type.startswith("text/event-stream"):
        async for lines in _whole_lines(chunks):
            yield b"\n".join(map(_public, lines))
    elif content_type.startswith("application/json"):
        answer = b"".join([chunk async for chunk in chunks])
        yield await call.off_loop(len(answer), partial(_public, answer))
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


def _error_of(status: int, body: bytes) -> Exception:
    """The engine's error in our words; what went wrong inside of it is for the log alone."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        said = body[:_SHOWN_BYTES].decode(errors="replace")
    message, param = _message_of(said)
    if status >= _FIRST_SERVER_ERROR:
        return EngineError(f"the engine answered {status}: {message}")
    return Failure(status, message or f"the engine answered {status}", "engine_refused", param)


def _message_of(said: Any) -> tuple[str, str | None]:
    """The message in an engine's error, in any of their forms, and the field that it names."""
    if isinstance(said, dict):
        inner = said.get("error") or said.get("detail") or said
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            param = inner.get("param")
            return inner["message"][:_SHOWN_BYTES], param if isinstance(param, str) else None
        said = inner if isinstance(inner, str) else msgspec.json.encode(inner).decode()
    return (said if isinstance(said, str) else str(said))[:_SHOWN_BYTES], None


def _stream_error(said: Mapping[str, Any]) -> bytes:
    """The line of an error within a stream."""
    error = said["error"]
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and _FIRST_ERROR <= code < 600 else 500  # noqa: PLR2004
    message, param = _message_of(said)
    if status >= _FIRST_SERVER_ERROR:
        log.warning("an engine ended a stream of a client: %s", message)
        return stream_failed(Failure(500, "the worker failed this request", "worker_failed"))[:-2]
    return stream_failed(Failure(status, message, "engine_refused", param))[:-2]


def _public(line: bytes) -> bytes:
    if line.startswith(b"data:") and b'"error"' in line[:_ERROR_WITHIN]:
        try:
            said = msgspec.json.decode(line[len(b"data:") :])
        except msgspec.MsgspecError:
            return line
        if isinstance(said, dict) and said.get("error") and not said.get("choices"):
            return _stream_error(said)
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
    if not isinstance(own, str | None) or own == "":
        raise RequestError("cache_salt: expected a string that is not empty", "cache_salt")
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
    return text.chat_prompt(messages, variables=variables).text

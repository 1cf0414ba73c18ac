"""From an inference request to what core asks: its tensors are the prompt, its parameters sampling.

Parameters have the names of OpenAI's API and are read by the same classes, so each has the same
bounds. A parameter that is not known, or would have no effect, is refused, never dropped.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any

import attrs
import msgspec
from attrs import frozen

from commutator import Operation
from commutator.contract.conversation import Generate
from commutator.errors import RequestError
from commutator.frontend import Call
from commutator_kserve.inference import Inference
from commutator_kserve.tensors import Tensor, text_of
from commutator_openai.chat import asked_chat, asked_completion, parse_body, unserved_hints
from commutator_openai.embeddings import EmbeddingRequest, cut_of
from commutator_openai.pooling import Asked
from commutator_openai.requests import ChatRequest, CompletionRequest
from commutator_openai.values import not_served, wrong

VERSION = "1"
"""Of every model."""

_PROMPTS = ("text_input", "messages", "input_ids")
_STREAM = ("streaming", "stream")
_OF_GENERATION = {*_PROMPTS, *_STREAM, "sampling_parameters", "exclude_input_in_output"}
_NEEDS_CHAT = {"tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"}
_RENAMED = {"session": "session_id"}
_OUR_OWN = {"chat", "schema", "adapter", "timeout", "triton_enable_empty_final_response"}
_NOT_OURS = {"model", "prompt", "messages", "input", "stream", "stream_options", "echo", "best_of"}
"""Fields of OpenAI's bodies that tensors say here, or nothing."""
_NO_TENSOR = {
    *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids"),
    *("return_token_ids", "return_tokens_as_token_ids", "include_reasoning", "encoding_format"),
}
_TEXTS = {
    *("user", "session_id", "cache_salt", "reasoning_effort", "prompt_cache_key"),
    *("safety_identifier", "guided_regex", "guided_grammar", "regex", "ebnf", "truncation_side"),
    *("guided_whitespace_pattern", "verbosity", "service_tier"),
}
"""Parameters that are text, whatever is in it."""
_TEXTS_OR_JSON = {"stop", "tool_choice"}
_MICROSECONDS = 1e6


@frozen(kw_only=True)
class Asking:
    """A request that generates."""

    generate: Generate
    is_stream: bool
    """Whether the client wants the answer in pieces."""


def check_version(version: str) -> None:
    """Raises RequestError for a version that no model has."""
    if version not in {"", VERSION}:
        raise RequestError(
            f"model_version: {version[:40]!r} is not served; every model has the version 1",
            "model_version",
            "model_not_found",
        )


def operation_of(call: Call, inference: Inference) -> tuple[str, str]:
    """(the model's name, what it is asked for: "generate" or "embed"). Raises RequestError."""
    check_version(inference.version)
    name, _ = call.text_model(inference.model or None, _session(inference))
    can = operations_of(call, name)
    embeds = inference.outputs is not None and "embedding" in inference.outputs
    if not can or (Operation.GENERATE in can and not (embeds and Operation.EMBED in can)):
        return name, Operation.GENERATE
    if Operation.EMBED in can:
        return name, Operation.EMBED
    raise RequestError(
        f"model: the workers of {name} neither generate nor embed, they {', '.join(sorted(can))}",
        "model",
        "unsupported_endpoint",
    )


def _session(inference: Inference) -> str | None:
    parameters = {**_of_tensor(inference), **inference.parameters}
    named = (parameters.get(name) for name in ("session", "session_id", "prompt_cache_key"))
    return next((one for one in named if isinstance(one, str) and one), None)


def operations_of(call: Call, model: str) -> set[str]:
    """What the model's workers offer."""
    return {one for info in call.services.dispatcher.infos(model) for one in info.operations}


def timeout_s(inference: Inference) -> float | None:
    """The time that the client gives the request, in seconds; it says microseconds."""
    given = inference.parameters.get("timeout")
    if given is None or given == 0:
        return None
    if type(given) is not int or given < 0:
        raise wrong("timeout", f"expected microseconds, got {str(given)[:40]}")
    return given / _MICROSECONDS


def asked_generation(call: Call, inference: Inference) -> Asking:
    """Raises RequestError for tensors and parameters that are wrong or unknown."""
    for name in inference.inputs:
        if name not in _OF_GENERATION:
            expected = ", ".join(sorted(_OF_GENERATION))
            text = f"{name[:100]}: unknown input; expected some of {expected}"
            raise RequestError(f"{text}; sampling is said by parameters", name[:100])
    stream, include = _is_stream(inference), _flag(inference, "exclude_input_in_output")
    parameters = {**_of_tensor(inference), **inference.parameters}
    prompt = [name for name in _PROMPTS if name in inference.inputs]
    if len(prompt) != 1:
        got = f"got {' and '.join(prompt)}" if prompt else "got none of them"
        raise RequestError(
            f"text_input: expected one of {', '.join(_PROMPTS)}; {got}", "text_input"
        )
    chat = _chat(parameters)
    by_messages = "messages" in prompt
    if chat is False and by_messages:
        raise wrong("chat", "messages are a chat")
    is_chat = by_messages or bool(chat) or (chat is None and bool(_NEEDS_CHAT & parameters.keys()))
    body: dict[str, Any]
    if is_chat:
        body = {"messages": _messages(inference.inputs[prompt[0]])}
        cls: Any = ChatRequest
    else:
        body = {"prompt": _prompt(inference.inputs[prompt[0]])}
        cls = CompletionRequest
    body |= {"model": inference.model or None, **_body(parameters, cls)}
    read = parse_body(cls, msgspec.json.encode(body), strict=True)
    if hints := unserved_hints(call, read):
        name, hint = next(iter(hints.items()))
        raise not_served(name, f"not supported, because {hint.why}; leave it out")
    asked = asked_chat(read) if is_chat else asked_completion(read)
    asked.stream = stream
    if include is False:
        if is_chat:
            raise not_served("exclude_input_in_output", "a chat's input is never in its output")
        asked.echo = True
    if asked.user is None:
        asked.user = inference.id or None
    asked.params = {**asked.params, "prompt": prompt[0], "messages": prompt[0]}
    return Asking(generate=asked, is_stream=stream)


def asked_embeddings(inference: Inference) -> Asked:
    """Raises RequestError."""
    for name in inference.inputs:
        if name not in {"text_input", "input_ids"}:
            raise RequestError(
                f"{name[:100]}: unknown input; expected text_input or input_ids", name[:100]
            )
    if len(inference.inputs) != 1:
        raise RequestError("text_input: expected it or input_ids", "text_input")
    (tensor,) = inference.inputs.values()
    if tensor.name == "text_input":
        inputs: list[Any] = text_of(tensor)
    else:
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        size = len(tensor.values) // rows if rows else 0
        ids = list(_ids(tensor))
        inputs = [ids[row * size : (row + 1) * size] for row in range(rows)]
    if not inputs or not all(inputs):
        raise wrong(tensor.name, "expected inputs of at least one token")
    body = {"input": inputs, **_body(inference.parameters, EmbeddingRequest)}
    try:
        read = parse_body(EmbeddingRequest, msgspec.json.encode(body), strict=True)
    except RequestError as error:
        raise _renamed(error, "input", tensor.name) from error
    return Asked(
        model=inference.model or None,
        operation=Operation.EMBED,
        inputs=read.input,
        param=tensor.name,
        cut=cut_of(read),
        dimensions=read.dimensions,
        priority=read.priority,
        user=read.user or inference.id or None,
        special_tokens=read.add_special_tokens is not False,
    )


def _renamed(error: RequestError, ours: str, theirs: str) -> RequestError:
    if error.param is None or not error.param.startswith(ours):
        return error
    text = str(error).removeprefix(ours)
    return RequestError(f"{theirs}{text}", theirs, error.code)


def _flag(inference: Inference, name: str) -> bool | None:
    tensor = inference.inputs.get(name)
    if tensor is None:
        return None
    if tensor.datatype != "BOOL" or len(tensor.values) != 1:
        raise wrong(name, "expected one value of the datatype BOOL")
    return bool(tensor.values[0])


def _is_stream(inference: Inference) -> bool:
    given = {name: found for name in _STREAM if (found := _flag(inference, name)) is not None}
    if len(given) > 1:
        raise wrong("stream", "streaming says the same; remove one")
    return any(given.values())


def _one_text(tensor: Tensor) -> str:
    texts = text_of(tensor)
    if len(texts) != 1:
        raise wrong(tensor.name, f"expected one string, got {len(texts)}: send a request for each")
    return texts[0]


def _ids(tensor: Tensor) -> list[int]:
    if tensor.datatype not in {"INT32", "INT64", "UINT32", "UINT64"}:
        raise wrong(tensor.name, f"expected token ids, got the datatype {tensor.datatype[:20]}")
    return list(tensor.values)


def _prompt(tensor: Tensor) -> str | list[int]:
    return _one_text(tensor) if tensor.name == "text_input" else _ids(tensor)


def _messages(tensor: Tensor) -> Any:
    if tensor.name == "input_ids":
        raise wrong("input_ids", "a chat is said by text_input or messages")
    text = _one_text(tensor)
    if tensor.name == "text_input":
        return [{"role": "user", "content": text}]
    return _json("messages", text)


def _of_tensor(inference: Inference) -> dict[str, Any]:
    """Parameters in a tensor, as JSON."""
    tensor = inference.inputs.get("sampling_parameters")
    if tensor is None:
        return {}
    found = _json("sampling_parameters", _one_text(tensor) or "{}")
    if not isinstance(found, dict):
        raise wrong("sampling_parameters", "expected a JSON object")
    for name in found.keys() & inference.parameters.keys():
        raise wrong(name[:100], "sampling_parameters has it, too; remove one")
    return found


def _chat(parameters: dict[str, Any]) -> bool | None:
    given = parameters.get("chat")
    if given is not None and not isinstance(given, bool):
        raise wrong("chat", "expected true or false")
    return given


def _body(parameters: Mapping[str, Any], cls: Any) -> dict[str, Any]:
    """The parameters as fields of a body of OpenAI's API. Raises RequestError."""
    body: dict[str, Any] = {}
    for given, sent in parameters.items():
        name = _RENAMED.get(given, given)
        if given == "chat" and cls is EmbeddingRequest:
            raise not_served("chat", "a model that makes vectors renders no chat; leave it out")
        if given in {"chat", "timeout", "triton_enable_empty_final_response"}:
            continue
        if given == "adapter":
            raise not_served("adapter", "requests name no adapters here: name it as the model")
        if given in _NO_TENSOR:
            raise not_served(given, "the answer has no tensor for it; leave it out")
        if given == "schema":
            name, schema = "response_format", {"name": "answer", "schema": _value(given, sent)}
            value: Any = {"type": "json_schema", "json_schema": schema}
        elif name in _fields(cls):
            value = _value(name, sent)
        else:
            raise _unknown(given, cls)
        if name in body:
            raise wrong(given, f"{name} says the same; remove one")
        body[name] = value
    return body


def _value(name: str, value: Any) -> Any:
    """What a field gets: clients that can send only strings send JSON."""
    if not isinstance(value, str) or name in _TEXTS:
        return value
    if name in _TEXTS_OR_JSON:
        try:
            found = _json(name, value) if value[:1] in {"[", "{"} else value
        except RequestError:
            return value
        return found
    return _json(name, value)


def _json(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise wrong(name[:100], f"expected JSON: {error}") from None


@cache
def _fields(cls: Any) -> frozenset[str]:
    return frozenset(field.name for field in attrs.fields(cls)) - _NOT_OURS


def _unknown(name: str, cls: Any) -> RequestError:
    known = _fields(cls) - _NO_TENSOR | _RENAMED.keys() | _OUR_OWN
    if cls is EmbeddingRequest:
        known -= {"chat", "schema", "session"}
    text = f"{name[:100]}: unknown parameter"
    if cls is CompletionRequest and name in _fields(ChatRequest):
        text += ", but of a chat: send `chat` as true with it"
    elif near := difflib.get_close_matches(name[:100], known, n=1):
        text += f"; did you mean {near[0]}?"
    return RequestError(text, name[:100], "unknown_parameter")

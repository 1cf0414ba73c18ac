"""Reads requests: bodies of the Messages API become what core asks, in no protocol's words.

Clients of many versions send many fields. Those without an effect here are named in the answer's
X-Commutator-Ignored; those that ask for what cannot be done are refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from attrs import define, evolve, field

from commutator.contract.conversation import (
    Conversation,
    Generate,
    Media,
    Message,
    Part,
    Reasoning,
    Speaker,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from commutator.contract.request import Constraint, KvRetention
from commutator.frontend import thinking_variables
from commutator_openai.values import (
    not_served,
    number,
    optional,
    required,
    shown,
    tool_name,
    without_nulls,
    wrong,
)

_BILLING = "x-anthropic-billing-header:"
"""Claude Code's first system block begins so, and differs from session to session: in a prompt it
would keep all that follows it out of every cache."""
_MAX_TOKENS = 2**31 - 1
_MAX_STOPS = 16
_MAX_NAME = 256
_LIFETIMES_S = {None: 300.0, "5m": 300.0, "1h": 3600.0}
"""Of ``cache_control.ttl``."""

_WITHOUT_EFFECT = frozenset({
    *("anthropic_beta", "betas", "container", "context_management"),
    *("diagnostics", "inference_geo", "mcp_servers", "metadata", "service_tier", "speed"),
})  # fmt: skip
"""Fields of the API that change nothing here; those of no API at all are ignored as well."""
_READ = frozenset({
    *("max_tokens", "messages", "model", "output_config", "stop_sequences", "stream", "system"),
    *("temperature", "thinking", "tool_choice", "tools", "top_k", "top_p", "metadata"),
    "cache_control",
})  # fmt: skip


@define
class Asked:
    """A request that was read."""

    generate: Generate
    ignored: list[str] = field(factory=list)
    """The fields that have no effect."""


def read_request(body: Mapping[str, Any], *, server_tools: Literal["leave_out", "refuse"]) -> Asked:
    """Body of POST /v1/messages. Raises RequestError that names the field."""
    given = without_nulls(body)
    limit = required(given, "max_tokens", int, "an integer of at least 1")
    if not 1 <= limit <= _MAX_TOKENS:
        raise wrong("max_tokens", f"expected an integer of at least 1, got {limit}")
    conversation, ignored = read_conversation(body, server_tools=server_tools)
    metadata = optional(given, "metadata", dict, "an object") or {}
    stops = optional(given, "stop_sequences", list, "a list of strings") or []
    if len(stops) > _MAX_STOPS or not all(isinstance(stop, str) for stop in stops):
        raise wrong("stop_sequences", f"expected at most {_MAX_STOPS} strings")
    user = metadata.get("user_id")
    generate = Generate(
        model=_model(given),
        conversation=conversation,
        stream=bool(optional(given, "stream", bool, "true or false")),
        max_tokens=limit,
        temperature=number(given, "temperature", 0, 1),
        top_p=number(given, "top_p", 0, 1),
        top_k=optional(given, "top_k", int, "an integer"),
        stop=tuple(stops),
        user=None if user is None else str(user)[:_MAX_NAME],
        session_id=_session(user),
        constraint=_constraint(given),
        retention=_mark(given, ""),
        params={
            "prompt": "messages",
            "stop": "stop_sequences",
            "response_format": "output_config.format",
            "retention": "cache_control",
        },
    )
    if generate.top_p == 0:  # the likeliest token alone
        generate.top_p, generate.top_k = None, 1
    return Asked(generate, ignored)


def read_conversation(
    body: Mapping[str, Any], *, server_tools: Literal["leave_out", "refuse"]
) -> tuple[Conversation, list[str]]:
    """What is said and the tools, as count_tokens has them, too; and the fields without effect."""
    given = without_nulls(body)
    ignored = sorted(given.keys() - _READ)
    listed = optional(given, "tools", list, "a list of tools") or []
    system = _system(given.get("system"), _last_mark(listed, "tools"))
    entries = required(given, "messages", list, "a list of messages")
    messages: list[Message] = []
    for i, entry in enumerate(entries):
        of_servers: list[str] = []
        messages += _messages(entry, i, of_servers)
        if of_servers and server_tools == "refuse":
            raise not_served(of_servers[0], "only what the client ran itself is served")
        ignored += of_servers
    if not messages:
        raise wrong("messages", "expected at least one message that says something")
    tools, left_out = _tools(listed, server_tools)
    if left_out:
        ignored.append("tools")
    variables = _template_variables(given, ignored)
    choice = _choice(given.get("tool_choice"), tools)
    return (
        Conversation(
            messages=[*system, *messages],
            tools=() if choice is not None and choice.mode == "none" else tools,
            tool_choice=choice if tools else None,
            variables=variables or None,
        ),
        ignored,
    )


# ------------------------------------------------------------------------ what was said


def _system(value: Any, of_tools: KvRetention | None) -> list[Message]:
    """``of_tools``: the mark of a tool, which templates show beside it."""
    if value is None:
        return []
    mark = of_tools
    if isinstance(value, str):
        blocks = [value]
    else:
        blocks = [_text_of(block, f"system.{i}") for i, block in enumerate(_list(value, "system"))]
        mark = _last_mark(value, "system") or of_tools
    said = "\n".join(block for block in blocks if not block.startswith(_BILLING))
    return [Message(role="system", content=said, retention=mark)] if said else []


def _messages(entry: Any, place: int, of_servers: list[str]) -> Iterator[Message]:
    """The messages that one of the API's becomes: each result of a tool speaks for itself.

    The paths of blocks that the API's servers wrote about tools of theirs go to ``of_servers``.
    """
    path = f"messages.{place}"
    if not isinstance(entry, dict):
        raise wrong(path, f"expected an object, got {shown(entry)}")
    role, content = entry.get("role"), entry.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{path}.role", f'expected "user", "assistant" or "system", got {shown(role)}')
    speaker: Speaker = role
    if isinstance(content, str):
        yield Message(role=speaker, content=content)
        return
    parts: list[Part] = []
    of_results: list[Part] = []
    mark: KvRetention | None = None
    for i, block in enumerate(_list(content, f"{path}.content")):
        if role == "assistant" and _is_of_servers(block):
            of_servers.append(f"{path}.content.{i}")
            continue
        part = _part(block, speaker, f"{path}.content.{i}")
        if isinstance(part, ToolResult):
            pictures = [one for one in part.parts if isinstance(one, Media)]
            texts = [one for one in part.parts if not isinstance(one, Media)]
            yield Message(
                role="tool",
                content=[ToolResult(call_id=part.call_id, parts=texts)],
                retention=_mark_of_result(block, f"{path}.content.{i}"),
            )
            of_results += pictures  # a tool's message is text: the user shows its pictures
            continue
        mark = _mark(block, f"{path}.content.{i}") or mark
        if part is not None:
            parts.append(part)
    parts = [*of_results, *parts]
    if parts and all(isinstance(part, Text) for part in parts):
        said = "\n".join(part.text for part in parts if isinstance(part, Text))
        yield Message(role=speaker, content=said, retention=mark)
    elif parts:
        yield Message(role=speaker, content=parts, retention=mark)


def _is_of_servers(block: Any) -> bool:
    """Whether it tells of a tool that the API's servers ran, as in conversations begun there."""
    kind = block.get("type") if isinstance(block, dict) else None
    return isinstance(kind, str) and (
        kind in ("server_tool_use", "mcp_tool_use") or kind.endswith("_tool_result")
    )


def _part(block: Any, role: Speaker, path: str) -> Part | None:
    """None: of no use to a model."""
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise wrong(path, f'expected an object with "type", got {shown(block)}')
    match block["type"]:
        case "text":
            return Text(_text_of(block, path))
        case "image" | "document" as kind if role != "assistant":
            return _media(block, kind, path)
        case "search_result" if role == "user":
            found = [required(block, key, str, "a string", path) for key in ("title", "source")]
            texts = _list(block.get("content"), f"{path}.content")
            found += [_text_of(one, f"{path}.content.{i}") for i, one in enumerate(texts)]
            return Text("\n".join(found))
        case "tool_use" if role == "assistant":
            name = required(block, "name", str, "the tool's name", path)
            arguments = block.get("input") or {}
            if not isinstance(arguments, dict):
                raise wrong(f"{path}.input", f"expected an object, got {shown(arguments)}")
            call_id = required(block, "id", str, "the call's id", path)
            return ToolCall(id=call_id, name=name, arguments=_json(arguments))
        case "tool_result" if role == "user":
            return _result(block, path)
        case "thinking" if role == "assistant":
            thought = block.get("thinking")
            return Reasoning(thought) if isinstance(thought, str) and thought else None
        case "redacted_thinking" if role == "assistant":
            return None  # only who wrote it can read it
    raise not_served(f"{path}.type", f"{block['type']} is not served in a message of the {role}")


def _result(block: Mapping[str, Any], path: str) -> ToolResult:
    call_id = required(block, "tool_use_id", str, "the id of the tool_use", path)
    content = block.get("content")
    if content is None:
        parts: list[Text | Media] = []
    elif isinstance(content, str):
        parts = [Text(content)]
    else:
        parts = []
        for i, one in enumerate(_list(content, f"{path}.content")):
            if isinstance(one, dict) and one.get("type") == "tool_reference":
                parts.append(Text(str(one.get("tool_name", ""))))
                continue
            part = _part(one, "user", f"{path}.content.{i}")
            if not isinstance(part, Text | Media):
                raise wrong(f"{path}.content.{i}", "expected text, an image or a document")
            parts.append(part)
    if block.get("is_error") and not parts:
        parts = [Text("error")]
    return ToolResult(call_id=call_id, parts=parts)


def _media(block: Mapping[str, Any], kind: str, path: str) -> Text | Media:
    source = required(block, "source", dict, "an object", path)
    what: Any = source.get("type")
    if what == "text" and isinstance(source.get("data"), str):
        return Text(source["data"])
    if what == "content" and kind == "document":
        content = source.get("content")
        if isinstance(content, str):
            return Text(content)
        texts = [_text_of(one, f"{path}.source.content") for one in _list(content, path)]
        return Text("\n".join(texts))
    name = "image" if kind == "image" else "file"
    if what == "url" and isinstance(source.get("url"), str):
        return Media(kind=name, url=source["url"])
    if what == "base64" and isinstance(source.get("data"), str):
        data, media_type = source["data"], source.get("media_type")
        digest = hashlib.sha256(data.encode()).hexdigest()
        return Media(kind=name, digest=digest, url=f"data:{media_type};base64,{data}")
    raise not_served(f"{path}.source.type", f"{shown(what)} is not served")


# ------------------------------------------------------------------------- what is marked


def without_lifetimes(generate: Generate) -> Generate:
    """With marks that only say where they are: of a client that may not have its blocks kept."""
    conversation = generate.conversation
    assert conversation is not None
    messages = [
        one if one.retention is None else evolve(one, retention=KvRetention())
        for one in conversation.messages
    ]
    return evolve(
        generate,
        conversation=evolve(conversation, messages=messages),
        retention=None if generate.retention is None else KvRetention(),
    )


def _mark(block: Any, path: str) -> KvRetention | None:
    """``cache_control`` of a block, a tool or the request."""
    given = block.get("cache_control") if isinstance(block, dict) else None
    if given is None:
        return None
    place = f"{path}.cache_control".removeprefix(".")
    if not isinstance(given, dict) or given.get("type") != "ephemeral":
        raise wrong(place, f'expected {{"type": "ephemeral", ...}}, got {shown(given)}')
    ttl = given.get("ttl")
    if not isinstance(ttl, str | None) or ttl not in _LIFETIMES_S:
        raise wrong(f"{place}.ttl", f'expected "5m" or "1h", got {shown(ttl)}')
    return KvRetention(priority=1, ttl_s=_LIFETIMES_S[ttl])


def _last_mark(blocks: Sequence[Any], path: str) -> KvRetention | None:
    marks = [_mark(block, f"{path}.{i}") for i, block in enumerate(blocks)]
    return next((mark for mark in reversed(marks) if mark is not None), None)


def _mark_of_result(block: Mapping[str, Any], path: str) -> KvRetention | None:
    content = block.get("content")
    inner = _last_mark(content, f"{path}.content") if isinstance(content, list) else None
    return _mark(block, path) or inner


# ------------------------------------------------------------------------------- tools


def _tools(
    entries: Sequence[Any], server_tools: Literal["leave_out", "refuse"]
) -> tuple[list[Tool], bool]:
    """The client's own tools, and whether others, which the API's servers would run, are left."""
    tools: list[Tool] = []
    left_out = False
    for i, entry in enumerate(entries):
        path = f"tools.{i}"
        if not isinstance(entry, dict):
            raise wrong(path, f"expected an object, got {shown(entry)}")
        kind = entry.get("type") or "custom"
        if kind != "custom":
            if server_tools == "refuse" or not isinstance(kind, str):
                raise not_served(
                    f"{path}.type",
                    f"{shown(kind)} is not served; only custom tools are, which the client runs "
                    "itself",
                )
            left_out = True
            continue
        schema = entry.get("input_schema")
        if schema is not None and not isinstance(schema, dict):
            raise wrong(f"{path}.input_schema", f"expected an object, got {shown(schema)}")
        name = tool_name(entry, path)
        if any(name == tool.name for tool in tools):
            raise wrong(f"{path}.name", f'"{name}" is there twice; names of tools are unique')
        tools.append(
            Tool(
                name=name,
                description=optional(entry, "description", str, "a string", path) or "",
                parameters=schema or {},
                strict=bool(entry.get("strict")),
            )
        )
    return tools, left_out


def _choice(value: Any, tools: Sequence[Tool]) -> ToolChoice | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong("tool_choice", f"expected an object, got {shown(value)}")
    parallel = not value.get("disable_parallel_tool_use")
    match value.get("type"):
        case "auto" | "none" as mode:
            return ToolChoice(mode=mode, parallel=parallel)
        case "any":
            mode, name = "required", None
        case "tool":
            mode, name = "named", required(value, "name", str, "a tool's name", "tool_choice")
        case other:
            known = '"auto", "any", "tool" or "none"'
            raise wrong("tool_choice.type", f"expected {known}, got {shown(other)}")
    if not tools or (name is not None and all(tool.name != name for tool in tools)):
        raise wrong("tool_choice", "expected one of `tools`, and it is not among them")
    return ToolChoice(mode=mode, name=name, parallel=parallel)  # type: ignore[arg-type]


# -------------------------------------------------------------------------- how to think


def _template_variables(given: Mapping[str, Any], ignored: list[str]) -> dict[str, Any]:
    """What templates of models that reason know: whether to, and how much."""
    thinks: bool | None = None
    thinking = optional(given, "thinking", dict, "an object") or {}
    match thinking.get("type"):
        case "enabled":
            thinks = True
            if thinking.get("budget_tokens") is not None:
                ignored.append("thinking.budget_tokens")
        case "disabled":
            thinks = False
        case None | "adaptive" | "between_tools":
            pass
        case other:
            known = '"enabled", "disabled", "adaptive" or "between_tools"'
            raise wrong("thinking.type", f"expected {known}, got {shown(other)}")
    config = optional(given, "output_config", dict, "an object") or {}
    effort = optional(config, "effort", str, "a string", "output_config")
    return thinking_variables(effort, thinks)


def _constraint(given: Mapping[str, Any]) -> Constraint | None:
    """``output_config.format``: a JSON schema."""
    config = optional(given, "output_config", dict, "an object") or {}
    path, described = "output_config.format", config.get("format")
    if described is None:
        return None
    if not isinstance(described, dict) or described.get("type") != "json_schema":
        raise wrong(path, f'expected {{"type": "json_schema", ...}}, got {shown(described)}')
    schema = _json(required(described, "schema", dict, "an object", path))
    return Constraint(kind="json_schema", value=schema)


def _session(user: Any) -> str | None:
    """Claude Code's ``metadata.user_id`` is JSON that names the session."""
    if isinstance(user, str) and user.startswith("{"):
        try:
            found = msgspec.json.decode(user).get("session_id")
        except msgspec.DecodeError:
            return None
        return found[:_MAX_NAME] if isinstance(found, str) else None
    return None


# ------------------------------------------------------------------------------- values


def _model(given: Mapping[str, Any]) -> str:
    return required(given, "model", str, "a name from /v1/models")


def _text_of(block: Any, path: str) -> str:
    if isinstance(block, str):
        return block
    if not isinstance(block, dict) or not isinstance(block.get("text"), str):
        raise wrong(path, f'expected {{"type": "text", "text": ...}}, got {shown(block)}')
    text: str = block["text"]
    return text


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(path, f"expected a string or a list of blocks, got {shown(value)}")
    return value


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()

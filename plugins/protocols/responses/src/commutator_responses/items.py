"""Items of a conversation: what clients send, what a model reads, and what is kept of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from commutator.contract.conversation import (
    Media,
    Message,
    Part,
    Reasoning,
    Speaker,
    Text,
    ToolCall,
    ToolResult,
)
from commutator_openai.values import not_served, object_at, optional, required, shown, wrong
from commutator_responses.summary import unsealed
from commutator_responses.tools import ServerTools, custom_arguments, model_name

Item = dict[str, Any]
"""As in JSON."""

_ROLES = ("user", "assistant", "system", "developer")
_OF_SERVERS = frozenset({
    *("code_interpreter_call", "file_search_call", "image_generation_call", "web_search_call"),
    *("mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools"),
    *("tool_search_call", "tool_search_output"),
})  # fmt: skip
"""What OpenAI's servers did; it has no text for a model."""
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}
"""Of the ids of items, by type."""
_SUMMARY = "Summary of the conversation so far:"
_TURNS: Mapping[type[Part], int] = {Reasoning: 0, Text: 1, Media: 1, ToolCall: 2}
"""The order in which the parts of one turn of an assistant come."""


def input_items(value: Any) -> list[Item]:
    """``input`` as a list of items. Raises RequestError."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong("input", f"expected a string or a list of items, got {shown(value)}")
    return [_typed(object_at(one, f"input.{i}"), f"input.{i}") for i, one in enumerate(value)]


def _typed(item: Item, path: str) -> Item:
    """Messages may come without a type."""
    kind = item.get("type")
    if kind is None and "role" in item:
        return {**item, "type": "message"}
    if not isinstance(kind, str):
        raise wrong(f"{path}.type", f"expected the type of an item, got {shown(kind)}")
    return item


def with_ids(items: Sequence[Item], key: str) -> list[Item]:
    """As the API lists items: each with an id, made of ``key`` where it has none."""
    return [_listed(item, f"{key}_i{number}") for number, item in enumerate(items)]


def _listed(item: Item, suffix: str) -> Item:
    kind = item["type"]
    prefix = _PREFIXES.get(kind)
    if prefix is None:
        return item
    listed = {**item, "id": item.get("id") or f"{prefix}_{suffix}"}
    listed["status"] = item.get("status") or "completed"
    if kind == "reasoning":
        listed["summary"] = item.get("summary") or []
    elif kind == "message" and isinstance(content := item.get("content"), str):
        own = item["role"] == "assistant"
        part: Item = {"type": "output_text" if own else "input_text", "text": content}
        listed["content"] = [{**part, "annotations": []} if own else part]
    return listed


def messages_of(
    items: Sequence[Item], server_tools: ServerTools, ignored: list[str], earlier: int = 0
) -> list[Message]:
    """What is said in ``items``, of which the first ``earlier`` were read before.

    What OpenAI's servers did is left out, and named in ``ignored``. Raises RequestError.
    """
    messages: list[Message] = []
    for number, item in enumerate(items, -earlier):
        path = f"input.{number}"
        if item["type"] in _OF_SERVERS and server_tools == "leave_out":
            ignored.append(path)
            continue
        role, parts = _said(item, path)
        last = messages[-1] if messages else None
        if not parts:
            continue
        if (
            role == "assistant"
            and last is not None
            and last.role == "assistant"
            and not isinstance(last.content, str)
            and _continues(last.content[-1], parts[0])
        ):
            last.content = [*last.content, *parts]
        else:
            messages.append(Message(role=role, content=parts))
    for message in messages:
        if len(message.content) == 1 and isinstance(message.content[0], Text):
            message.content = message.content[0].text
    return messages


def _continues(last: Part, new: Part) -> bool:
    """Whether what an assistant said belongs to the same turn: thoughts, then text, then calls."""
    before, after = _TURNS[type(last)], _TURNS[type(new)]
    return before < after or (isinstance(last, ToolCall) and isinstance(new, ToolCall))


def _said(item: Item, path: str) -> tuple[Speaker, list[Part]]:
    """Who speaks, and what; nothing where it is of no use to a model."""
    match item["type"]:
        case "message":
            role = item.get("role")
            if role not in _ROLES:
                expected = '"user", "assistant", "system" or "developer"'
                raise wrong(f"{path}.role", f"expected {expected}, got {shown(role)}")
            return role, [*_parts(item.get("content"), f"{path}.content")]
        case "function_call" | "custom_tool_call" as kind:
            name = required(item, "name", str, "the tool's name", path)
            if kind == "custom_tool_call":
                arguments = custom_arguments(required(item, "input", str, "a string", path))
            else:
                arguments = required(item, "arguments", str, "JSON in a string", path)
            namespace = optional(item, "namespace", str, "a string", path)
            call_id = required(item, "call_id", str, "the call's id", path)
            call = ToolCall(id=call_id, name=model_name(name, namespace), arguments=arguments)
            return "assistant", [call]
        case "function_call_output" | "custom_tool_call_output":
            call_id = required(item, "call_id", str, "the call's id", path)
            parts = [*_parts(item.get("output"), f"{path}.output")]
            return "tool", [ToolResult(call_id=call_id, parts=parts)]
        case "reasoning":
            thoughts = _thoughts(item, path)
            return "assistant", [Reasoning(thoughts)] if thoughts else []
        case "compaction":
            summary = unsealed(item.get("encrypted_content"), f"{path}.encrypted_content")
            return "assistant", [Text(f"{_SUMMARY}\n\n{summary}")]
        case kind:
            known = ", ".join(_PREFIXES)
            raise not_served(f"{path}.type", f"{shown(kind)} is not served; these are: {known}")


def _parts(content: Any, path: str) -> Iterator[Text | Media]:
    if isinstance(content, str):
        yield Text(content)
        return
    if not isinstance(content, list):
        raise wrong(path, f"expected a string or a list of parts, got {shown(content)}")
    for number, part in enumerate(content):
        where = f"{path}.{number}"
        match object_at(part, where).get("type"):
            case "input_text" | "output_text" | "text":
                yield Text(required(part, "text", str, "a string", where))
            case "refusal":
                yield Text(required(part, "refusal", str, "a string", where))
            case "input_image":
                yield _media("image", part, ("image_url",), where)
            case "input_file":
                yield _media("file", part, ("file_data", "file_url"), where)
            case kind:
                raise not_served(
                    f"{where}.type",
                    f"{shown(kind)} is not served; input_text, output_text, refusal, input_image "
                    "and input_file are",
                )


def _media(kind: str, part: Mapping[str, Any], names: Sequence[str], path: str) -> Media:
    """What comes by URL or in the request itself; files that OpenAI's servers keep are not here."""
    if part.get("file_id") is not None:
        raise not_served(f"{path}.file_id", "files are not kept here; send the content")
    for name in names:
        url = optional(part, name, str, "a URL", path)
        if url is not None:
            inside = url.startswith("data:")
            digest = hashlib.sha256(url.encode()).hexdigest() if inside else None
            return Media(kind=kind, url=url, digest=digest)
    raise wrong(path, f"expected {' or '.join(names)}")


def _thoughts(item: Item, path: str) -> str:
    """What a model thought, or else its summary; what is encrypted nobody here can read."""
    for name in ("content", "summary"):
        entries = optional(item, name, list, "a list of parts", path) or []
        texts = [
            required(object_at(one, f"{path}.{name}.{i}"), "text", str, "a string", path)
            for i, one in enumerate(entries)
        ]
        if any(texts):
            return "\n".join(texts)
    return ""

"""The tools of a request: functions, custom tools and namespaces become functions of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from attrs import field, frozen

from commutator.contract.conversation import Tool, ToolChoice
from commutator.errors import RequestError
from commutator_openai.values import (
    not_served,
    object_at,
    optional,
    required,
    shown,
    tool_name,
    wrong,
)

ServerTools = Literal["leave_out", "refuse"]
"""What becomes of tools that OpenAI's servers run."""

_CUSTOM_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's whole input."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""To the model a custom tool is a function of one text."""
_MODES = ("auto", "none", "required")


@frozen(kw_only=True)
class ToolName:
    """How items name a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    """Its calls are `custom_tool_call`, with a text, instead of `function_call`, with JSON."""


@frozen(kw_only=True)
class Toolbox:
    """What the model may call."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice | None = None
    names: Mapping[str, ToolName] = field(factory=dict)
    """By the names that the model knows."""
    shown: Sequence[Mapping[str, Any]] = ()
    """As the response shows them: without those that are left out."""
    shown_choice: Any = "auto"
    """As the response shows it."""
    ignored: Sequence[str] = ()
    """The fields that have no effect."""

    def named(self, name: str) -> ToolName:
        """How items name the tool that the model called."""
        return self.names.get(name) or ToolName(name=name)


def model_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool: names in a namespace need be unique only there."""
    return name if namespace is None else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """The arguments, JSON, of a custom tool's call with the input ``text``."""
    return msgspec.json.encode({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """The input of a custom tool's call, out of the arguments that the model wrote.

    What is not as the tool's schema has it is the input as it stands.
    """
    try:
        found = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def read_toolbox(given: Mapping[str, Any], server_tools: ServerTools) -> Toolbox:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls``. Raises RequestError."""
    entries = optional(given, "tools", list, "a list of tools") or []
    tools: list[Tool] = []
    names: dict[str, ToolName] = {}
    shown_tools: list[Mapping[str, Any]] = []
    left_out: list[Any] = []
    for number, entry in enumerate(entries):
        path = f"tools.{number}"
        object_at(entry, path)
        kind = entry.get("type")
        if kind in ("function", "custom", "namespace"):
            found = [*_tools(entry, path)]
            for tool, name in found:
                if tool.name in names:
                    raise wrong(path, f'"{tool.name}" is there twice; names of tools are unique')
                tools.append(tool)
                names[tool.name] = name
            shown_tools.append(_shown_function(entry) if kind == "function" else entry)
        elif server_tools == "refuse" or not isinstance(kind, str):
            raise not_served(
                f"{path}.type",
                f"{shown(kind)} is not served; function, custom and namespace are, which the "
                "client runs itself",
            )
        else:
            left_out.append(kind)
    ignored = ["tools"] if left_out else []
    parallel = optional(given, "parallel_tool_calls", bool, "true or false") is not False
    wanted, choice, shown_choice = _choice(given.get("tool_choice"), names, left_out, parallel)
    if choice is None and left_out and given.get("tool_choice") not in (None, "auto", "none"):
        ignored.append("tool_choice")
    if choice is None and not parallel:
        choice = ToolChoice(parallel=False)
    return Toolbox(
        tools=tuple(tool for tool in tools if wanted is None or tool.name in wanted),
        choice=choice,
        names=names,
        shown=shown_tools,
        shown_choice=shown_choice,
        ignored=ignored,
    )


def _tools(entry: Mapping[str, Any], path: str) -> Iterator[tuple[Tool, ToolName]]:
    """The functions that one entry stands for, and how items name them."""
    if entry.get("type") != "namespace":
        yield _tool(entry, path, None)
        return
    namespace = tool_name(entry, path)
    for number, one in enumerate(required(entry, "tools", list, "a list of tools", path)):
        where = f"{path}.tools.{number}"
        if object_at(one, where).get("type") not in ("function", "custom"):
            kind = shown(one.get("type"))
            raise not_served(f"{where}.type", f"{kind} is not served; function and custom are")
        yield _tool(one, where, namespace)


def _tool(entry: Mapping[str, Any], path: str, namespace: str | None) -> tuple[Tool, ToolName]:
    name = tool_name(entry, path)
    description = optional(entry, "description", str, "a string", path) or ""
    is_custom = entry["type"] == "custom"
    schema: Mapping[str, Any] = _CUSTOM_SCHEMA
    if is_custom:
        form = optional(entry, "format", dict, "an object", path) or {"type": "text"}
        if form.get("type") != "text":
            raise not_served(
                f"{path}.format.type", f'{shown(form.get("type"))} is not served; "text" is'
            )
    else:
        schema = optional(entry, "parameters", dict, "a JSON Schema, an object", path) or {}
    tool = Tool(
        name=model_name(name, namespace),
        description=description,
        parameters=schema,
        strict=bool(optional(entry, "strict", bool, "true or false", path)),
    )
    return tool, ToolName(name=name, namespace=namespace, is_custom=is_custom)


def _shown_function(entry: Mapping[str, Any]) -> dict[str, Any]:
    """With every field that the API's own answers have."""
    return {
        "type": "function",
        "name": entry["name"],
        "description": entry.get("description"),
        "parameters": entry.get("parameters"),
        "strict": bool(entry.get("strict")),
    }


def _choice(
    value: Any, names: Mapping[str, ToolName], left_out: Sequence[Any], parallel: bool
) -> tuple[Sequence[str] | None, ToolChoice | None, Any]:
    """(the tools that may be called, None for all; what must be; as the response shows it)."""
    if value is None:
        return None, None, "auto"
    if isinstance(value, str):
        if value not in _MODES:
            raise wrong("tool_choice", f'expected "auto", "none" or "required", got {shown(value)}')
        if names:
            return None, ToolChoice(mode=value, parallel=parallel), value  # type: ignore[arg-type]
        if value == "required" and not left_out:
            raise wrong("tool_choice", '"required" needs `tools`')
        return None, None, "auto" if value == "required" else value
    return _choice_among(value, names, left_out, parallel)


def _choice_among(
    value: Any, names: Mapping[str, ToolName], left_out: Sequence[Any], parallel: bool
) -> tuple[Sequence[str] | None, ToolChoice | None, Any]:
    """As ``_choice``, of tools that are named."""
    match object_at(value, "tool_choice").get("type"):
        case "function" | "custom":
            name = _chosen(value, names, "tool_choice")
            return None, ToolChoice(mode="named", name=name, parallel=parallel), value
        case "allowed_tools":
            mode = value.get("mode")
            if mode not in ("auto", "required"):
                raise wrong("tool_choice.mode", f'expected "auto" or "required", got {shown(mode)}')
            allowed = required(value, "tools", list, "a list of tools", "tool_choice")
            wanted = [
                _chosen(object_at(one, f"tool_choice.tools.{i}"), names, f"tool_choice.tools.{i}")
                for i, one in enumerate(allowed)
                if not (isinstance(one, dict) and one.get("type") in left_out)
            ]
            return wanted, ToolChoice(mode=mode, parallel=parallel), value
        case kind if kind in left_out:
            return None, None, "auto"
        case kind:
            known = '"function", "custom" or "allowed_tools"'
            raise wrong("tool_choice.type", f"expected {known}, got {shown(kind)}")


def _chosen(value: Mapping[str, Any], names: Mapping[str, ToolName], path: str) -> str:
    """The model's name of a tool that is named as items name it."""
    name = required(value, "name", str, "a tool's name", path)
    namespace = optional(value, "namespace", str, "a string", path)
    for known, one in names.items():
        if one.name == name and namespace in (None, one.namespace):
            return known
    raise RequestError(
        f'{path}.name: "{name[:64]}" is not among `tools`', f"{path}.name", "invalid_value"
    )

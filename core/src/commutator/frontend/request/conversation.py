"""A conversation as chat templates take it: messages, calls and their results, and tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commutator.contract.conversation import (
    Conversation,
    Media,
    Message,
    Part,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from commutator.contract.parser import Parser
from commutator.errors import RequestError
from commutator.tokenizer.text_model import ChatTemplate

NOT_SERVED = "unsupported_parameter"
"""The code of a RequestError for what is known, but not served here."""

_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""What templates call the thoughts of an earlier turn."""

_CALL_CHARACTERS = 200
"""What a call costs to render beside its arguments."""
_WHETHER = ("enable_thinking", "thinking")
"""What templates call the choice to think: those of Qwen and GLM, and of others."""


def offered_tools(conversation: Conversation) -> Sequence[Tool]:
    """The tools that the prompt names: none where the model may call none."""
    choice = conversation.tool_choice
    return () if choice is not None and choice.mode == "none" else conversation.tools


def thinking_variables(effort: str | None, thinks: bool | None = None) -> dict[str, Any]:
    """What templates of models that reason know: how much, "none" is not to, and whether at all."""
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        thinks = False
    if thinks is not None:
        variables |= dict.fromkeys(_WHETHER, thinks)
    return variables


def check_template(conversation: Conversation, template: ChatTemplate | None) -> None:
    """Raises RequestError for tools and calls that the model's template would leave out."""
    if template is None or template.knows_tools:
        return
    param = "tools" if offered_tools(conversation) else "messages"
    contents = (one.content for one in conversation.messages if not isinstance(one.content, str))
    parts = (part for content in contents for part in content)
    if param == "tools" or any(isinstance(part, ToolCall | ToolResult) for part in parts):
        raise RequestError(
            f"{param}: the model's chat template does not write tools and their calls into the "
            "prompt; give the model one that does, by `chat_template` in its `models` entry",
            param,
            NOT_SERVED,
        )


def check_tools(
    conversation: Conversation, template: ChatTemplate | None, parser: Parser | None
) -> None:
    """Raises RequestError for tools that the model is not told of, or whose calls are not read."""
    check_template(conversation, template)
    if offered_tools(conversation) and (parser is None or not parser.reads_calls):
        raise RequestError(
            "tools: what this model writes is not searched for calls; name its family by "
            "`tool_parser` in its `models` entry"
            if parser is not None
            else "tools: no parser of calls is installed here; pip install commutator-parsers",
            "tools",
            NOT_SERVED,
        )


def characters_of(message: Message) -> int:
    """About as many as a template makes of it, beside what belongs to each message."""
    if isinstance(message.content, str):
        return len(message.content)
    characters = 0
    for part in message.content:
        if isinstance(part, ToolCall):
            characters += _CALL_CHARACTERS + len(part.arguments)
        else:
            given = part.parts if isinstance(part, ToolResult) else (part,)
            characters += sum(len(one.text) for one in given if not isinstance(one, Media))
    return characters


def messages_of(
    messages: Sequence[Message], template: ChatTemplate | None
) -> list[Mapping[str, Any]]:
    """The messages as templates know them.

    Raises RequestError for parts that are not served, and for results of calls that nobody made.
    """
    names: dict[str, str] = {}
    found: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.content
        if isinstance(content, str):
            plain: dict[str, Any] = {"role": message.role, "content": content}
            if message.name is not None:
                plain["name"] = message.name
            found.append(plain)
        else:
            found.append(_mapping(message, content, names, template))
    return found


def _mapping(
    message: Message,
    parts: Sequence[Part],
    names: dict[str, str],
    template: ChatTemplate | None,
) -> dict[str, Any]:
    """``names`` are those of the tools called so far, by the calls' ids."""
    texts = [_text_of(part) for part in parts if isinstance(part, Text | Media)]
    found: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if message.name is not None:
        found["name"] = message.name
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Reasoning):
            found |= dict.fromkeys(_REASONING_NAMES, part.text)
        elif isinstance(part, ToolResult):
            found["content"] = "\n".join(map(_text_of, part.parts))
            history = None if template is None else template.history
            found["tool_call_id"] = history.id_of(part.call_id) if history else part.call_id
            if part.call_id in names:
                found.setdefault("name", names[part.call_id])
        elif isinstance(part, ToolCall):
            names[part.id] = part.name
            call_id = part.id
            arguments: object = part.arguments
            if template is not None:
                call_id = template.history.id_of(call_id)
                arguments = template.history.arguments(part.arguments)
            function = {"name": part.name, "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
    if calls:
        found["tool_calls"] = calls
        if not found["content"] and template is not None:
            found["content"] = template.history.content
    return found


def _text_of(part: Text | Media) -> str:
    if isinstance(part, Text):
        return part.text
    raise RequestError(
        f"messages: {part.kind} is not served by these engines", "messages", NOT_SERVED
    )

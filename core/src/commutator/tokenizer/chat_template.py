"""Renders a conversation with the model's own chat template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from commutator.errors import ConfigError, RequestError

__all__ = [
    "ChatTemplate",
]


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """The inherited answer, without its four slow isinstance checks for loop variables."""
        if isinstance(obj, LoopContext):
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


class ChatTemplate:
    """One model's template, compiled. Raises ConfigError when its syntax is wrong."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """``variables`` are the same for every conversation, such as ``bos_token``."""
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            problem = f"its syntax is wrong{line}: {error.message}"
            raise ConfigError([problem], "chat template") from error
        # The engine's chain of mappings would be copied key by key for each conversation.
        self._template.globals = dict(self._template.globals)
        self._variables = dict(variables)
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for ``messages``: mappings with ``role`` and a string ``content``.

        ``continue_final_message`` ends the prompt right after the last message's content.
        Raises RequestError when the template refuses the conversation.
        """
        messages = [self._in_known_role(message) for message in messages]
        try:
            text = self._template.render(
                {
                    **self._variables,
                    "tools": None,
                    "documents": None,
                    **(variables or {}),
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        # A template is a program that runs on the client's data, so any error is about that data.
        except Exception as error:
            raise RequestError(
                f"the model's chat template refused the messages: {error}", "messages"
            ) from error
        return _up_to_content(text, messages[-1]["content"]) if continue_final_message else text

    def _in_known_role(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message


def _up_to_content(text: str, content: str) -> str:
    # Templates may strip the content, so its end is looked for without surrounding space.
    wanted = content.strip()
    at = text.rfind(wanted)
    if not wanted or at < 0:
        raise RequestError(
            "the final message cannot be continued: it is empty, or the model's chat template "
            "does not reproduce it",
            "continue_final_message",
        )
    end = at + len(wanted)
    trailing = content[len(content.rstrip()) :]
    return text[:end] + (trailing if text.startswith(trailing, end) else "")

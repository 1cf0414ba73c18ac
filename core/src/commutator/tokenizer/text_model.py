"""The text side of one served model: tokenizer, chat template and the ids that end an answer.

The model's own template is rendered in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from commutator.errors import ConfigError, RequestError
from commutator.tokenizer.cut_points import CutPoints, cut_points_of
from commutator.tokenizer.detokenizer import Detokenizer, token_bytes
from commutator.tokenizer.encoder import FastTokenizer

__all__ = ["ChatTemplate", "TextModel"]


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


class TextModel:
    """Text to tokens and back for one model. Read-only, so threads may share it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        eos_ids: frozenset[int],
        bos_id: int | None = None,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """``max_model_len`` is in tokens, prompt plus answer.

        ``special_tokens`` maps names such as ``bos_token`` to their text, for the chat template.
        """
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        self._bytes = token_bytes(tokenizer)
        self._longest_token_bytes = max(map(len, self._bytes.table), default=1) or 1
        self.special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._shown = tuple(
            b"" if token_id in self.special_ids else data
            for token_id, data in enumerate(self._bytes.table)
        )
        """The bytes of every token by id, none of special ones."""
        self._special_tokens = dict(special_tokens or {})
        self._chat_template: ChatTemplate | None = None
        if chat_template is not None:
            self.use_chat_template(chat_template)

    def use_chat_template(self, source: str) -> None:
        """Replace the model's own template. Raises ConfigError when its syntax is wrong."""
        self._chat_template = ChatTemplate(source, self._special_tokens)

    @cached_property
    def fast_tokenizer(self) -> FastTokenizer:
        """What front doors tokenize with; made when it is first asked for."""
        return FastTokenizer.of(self.tokenizer)

    @cached_property
    def cut_points(self) -> CutPoints:
        """Where texts may be cut; found when it is first asked for."""
        return cut_points_of(self.tokenizer)

    @property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: a text has at least its length divided by this as tokens."""
        return self._longest_token_bytes

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self._bytes.table)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Lets other threads run meanwhile."""
        # Unlike encode(), the batch form gives up the interpreter lock, and it is quicker.
        (encoding,) = self.tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        table = self._shown if skip_special_tokens else self._bytes.table
        detokenizer = Detokenizer(table, strip_space=self._bytes.leading_space)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """For one answer. Its first space stays, because it follows a prompt."""
        return Detokenizer(self._shown if skip_special_tokens else self._bytes.table)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt for a conversation; options as for ``ChatTemplate.render``.

        Raises RequestError when the model has no chat template or it refuses the messages.
        """
        if self._chat_template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions instead", "messages"
            )
        return self._chat_template.render(messages, **options)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; none for an id without a token."""
        table = self._bytes.table
        return table[token_id] if 0 <= token_id < len(table) else b""

    def token_text(self, token_id: int) -> str:
        r"""One token for display: its text, or ``bytes:\xe6\x97`` for part of a character."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

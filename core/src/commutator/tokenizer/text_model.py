"""The text side of one served model: tokenizer, chat template, and tokens back to text.

The model's own template is rendered in a sandbox. A stream of token ids becomes a stream of text, a
whole character at a time.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import product
from typing import Any, NoReturn

from attrs import evolve, frozen
from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from commutator.contract.conversation import Described
from commutator.errors import ConfigError, RequestError
from commutator.tokenizer.control_tokens import ControlTokens, RenderedPrompt
from commutator.tokenizer.cut_points import CutPoints, cut_points_of, steps_of
from commutator.tokenizer.defaults import AnswerDefaults
from commutator.tokenizer.encoder import FastTokenizer

_OF_DICT = frozenset(dir(Described))


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """The inherited answer, without its exceptions for keys of mappings."""
        if attribute in _OF_DICT or not (type(obj) is dict or type(obj) is Described):
            return super().getattr(obj, attribute)
        return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """The inherited answer, without its four slow isinstance checks for loop variables."""
        if isinstance(obj, LoopContext):
            return not attr.startswith("_")
        if type(obj) is list and attr in {"append", "pop"}:  # as some templates sort messages
            return True
        return super().is_safe_attribute(obj, attr, value)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """As templates know it from transformers; what a filter yields is a list."""
    if type(value) is Described and not (ensure_ascii or options) and indent is None:
        return value.as_json
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=list, **options)


@frozen
class CallHistory:
    """How a template wants an assistant's message that is nothing but calls."""

    content: str | None
    """Its text."""
    as_object: bool
    """Whether arguments are objects; otherwise they are JSON as text."""
    nine: bool = False
    """Whether ids are 9 letters and digits; it refuses others, such as those of other models."""

    def id_of(self, call_id: str) -> str:
        """The id of a call, or a short one that stands for it."""
        if self.nine and not re.fullmatch("[a-zA-Z0-9]{9}", call_id):
            return hashlib.sha256(call_id.encode()).hexdigest()[:9]
        return call_id

    def arguments(self, text: str) -> object:
        """The arguments of a call, which a model wrote as ``text``."""
        if not self.as_object:
            return text
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError):
            return text
        return value if isinstance(value, dict) else text


_HISTORIES = tuple(
    CallHistory(content, as_object) for content in ("", None) for as_object in (True, False)
)


class ChatTemplate:
    """One model's template, compiled. Raises ConfigError when its syntax is wrong."""

    def __init__(
        self, source: str, variables: Mapping[str, str], tokenizer: Tokenizer | None = None
    ) -> None:
        """``variables`` are the same for every conversation, such as ``bos_token``.

        With a ``tokenizer``, what clients write never becomes one of its control tokens.
        """
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._controls: ControlTokens | None = None
        try:
            parsed = environment.parse(source)
            self.reads = frozenset(meta.find_undeclared_variables(parsed))
            """The variables that it looks at."""
            if tokenizer is not None:
                controls = ControlTokens.of(tokenizer, parsed, environment, variables.values())
                self._controls = controls
                variables = {name: controls.seal(text) for name, text in variables.items()}
            self._template = environment.from_string(parsed)
        except TemplateError as error:
            line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            problem = f"its syntax is wrong{line}: {error.message}"
            raise ConfigError([problem], "chat template") from error
        # The engine's chain of mappings would be copied key by key for each conversation.
        self._template.globals = dict(self._template.globals)
        self._variables = dict(variables)
        self._knows_developer = "developer" in source
        self.source = source
        """The template's text."""
        self.knows_tools = "tools" in self.reads
        """Whether it writes the tools of a request into the prompt."""

    @cached_property
    def history(self) -> CallHistory:
        """How it wants the calls of earlier turns; found by rendering one in each way."""
        ids = (("call_of_another_model", False), ("a23456789", True))
        for style, (call_id, nine) in product(_HISTORIES, ids):
            function = {"name": "a_tool", "arguments": style.arguments('{"a_key": "a_value"}')}
            call = {"id": call_id, "type": "function", "function": function}
            asked = {"role": "user", "content": "text"}
            called = {"role": "assistant", "content": style.content, "tool_calls": [call]}
            try:
                text = self.render([asked, called], add_generation_prompt=False)
            except RequestError:
                continue
            wrong = ["{'a_key'", '\\"a_key', *(["None"] if style.content is None else [])]
            if "a_tool" in text and "a_value" in text and not any(one in text for one in wrong):
                return evolve(style, nine=nine)
        return _HISTORIES[0]

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of ``prompt``."""
        return self.prompt(messages, **options).text

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt for ``messages``: mappings with ``role`` and ``content``.

        ``continue_final_message`` ends the prompt right after the last message's content.
        Raises RequestError when the template refuses the conversation.
        """

        def write(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
            text = self._template.render(
                {
                    **self._variables,
                    "tools": None,
                    "documents": None,
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
            if continue_final_message:
                text = _up_to_content(text, messages[-1]["content"] or "")
            return text

        known, variables = [self._in_known_role(message) for message in messages], variables or {}
        try:
            if self._controls is None:
                return RenderedPrompt(write(known, variables))
            return self._controls.prompt(write, known, variables)
        except RequestError:
            raise
        # A template is a program that runs on the client's data, so any error is about that data.
        except Exception as error:
            said = str(error) if self._controls is None else self._controls.unseal(str(error))
            raise RequestError(
                f"the model's chat template refused the messages: {said}", "messages"
            ) from error

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


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One generated sequence's text so far; each token costs time only once.

    The bytes of the tokens pass through an incremental UTF-8 decoder: an unfinished character
    waits for its next token, and an invalid one becomes U+FFFD as soon as that is certain.
    """

    def __init__(self, table: Sequence[bytes], *, strip_space: bool = False) -> None:
        """``table`` holds the bytes by token id; ``strip_space`` drops one space at the start."""
        self._table = table
        self._strip_space = strip_space
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; ids without a token add nothing."""
        table = self._table
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < len(table):
            token_ids = [token_id for token_id in token_ids if 0 <= token_id < len(table)]
        return self._strip(self._decoder.decode(b"".join([table[one] for one in token_ids])))

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an unfinished character, or nothing."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


@frozen
class TokenBytes:
    """The bytes of every token, by id; an id without a token has none."""

    table: tuple[bytes, ...]
    leading_space: bool
    """The tokenizer puts one space before a whole text (SentencePiece)."""
    lossy: bool = False
    """It drops characters, so that the length of a text says nothing of its number of tokens."""


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Read the tokenizer's vocabulary through its decoder.

    Supports byte-level vocabularies, as of GPT-2, and SentencePiece ones with byte fallback; raises
    ConfigError for any other decoder.
    """
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None
    kinds = [step["type"] for step in steps_of(decoder, "decoders")]
    if "ByteLevel" in kinds:
        convert, leading_space = _byte_level_bytes, False
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        convert, leading_space = _byte_fallback_bytes, {"Strip", "Metaspace"} & {*kinds} != set()
    elif "WordPiece" in kinds:
        convert, leading_space = _word_piece_bytes, True
    else:
        known = "byte-level, byte-fallback, Metaspace or WordPiece"
        raise ConfigError(
            [f"expected a {known} decoder, found {kinds or 'none'}"],
            "tokenizer",
        )
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = convert(token)
    return TokenBytes(tuple(table), leading_space, not {"ByteLevel", "ByteFallback"} & {*kinds})


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level alphabet.

    Printable Latin-1 bytes stand for themselves; the others are numbered upwards from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token, written in plain text
        return token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()


def _word_piece_bytes(token: str) -> bytes:
    return (token[2:] if token.startswith("##") else f" {token}").encode()


class StopMatcher:
    """Passes text on until a stop string appears.

    The match that ends first wins, among equal ends the longest, so that the result does not
    depend on how the text was cut. Text is held back only while it may still become a match.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """``include_stop`` keeps the stop string itself in the text. Stops are not empty."""
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; from then on nothing more is passed on."""

    def push(self, text: str) -> str:
        """The text that is now certain to belong to the answer."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        if found := self._earliest(text):
            end, stop = found
            self._held, self.matched = "", stop
            return text[: end if self._include_stop else end - len(stop)]
        keep = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text held back; nothing follows it."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, text: str) -> tuple[int, str] | None:
        """(end, stop string) of the match that ends first."""
        found = [
            (at + len(stop), -len(stop), stop)
            for stop in self._stops
            if (at := text.find(stop)) >= 0
        ]
        if not found:
            return None
        end, _, stop = min(found)
        return end, stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning, not the whole, of ``stop``."""
    last = text[-1:]
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if stop[length - 1] == last and text.endswith(stop[:length]):
            return length
    return 0


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
        self.defaults = AnswerDefaults()
        """How answers are chosen where a request does not say it."""
        self._bytes = token_bytes(tokenizer)
        longest = max(map(len, self._bytes.table), default=1) or 1
        self.longest_token_bytes = sys.maxsize if self._bytes.lossy else longest
        """Bytes of the longest token: a text has at least its length divided by this as tokens."""
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
        self.special_tokens: Mapping[str, str] = dict(special_tokens or {})
        """Names such as `bos_token` to their texts, for the chat template."""
        self._chat_template: ChatTemplate | None = None
        if chat_template is not None:
            self.use_chat_template(chat_template)

    def use_chat_template(self, source: str, *, text_is_text: bool = True) -> None:
        """Replace the model's own template. Raises ConfigError when its syntax is wrong.

        ``text_is_text``: control tokens that clients write in conversations are none.
        """
        tokenizer = self.tokenizer if text_is_text else None
        self._chat_template = ChatTemplate(source, self.special_tokens, tokenizer)

    @cached_property
    def fast_tokenizer(self) -> FastTokenizer:
        """What front doors tokenize with; made when it is first asked for."""
        return FastTokenizer.of(self.tokenizer)

    @cached_property
    def cut_points(self) -> CutPoints:
        """Where texts may be cut; found when it is first asked for."""
        return cut_points_of(self.tokenizer)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self._bytes.table)

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template; None: it has none."""
        return self._chat_template

    @cached_property
    def special_texts(self) -> Mapping[int, str]:
        """The special tokens' texts, by id."""
        return {one: self._bytes.table[one].decode("utf-8", "replace") for one in self.special_ids}

    def with_added_tokens(self, tag: str) -> str:
        """A structural tag, as JSON, with the ids of tokens that marks in it may be."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        ids = {token.content: id_ for id_, token in added if id_ not in self.eos_ids}
        given = json.loads(tag)
        return json.dumps({**given, "added_tokens": ids}) if isinstance(given, dict) else tag

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
        return detokenizer.push([*token_ids]) + detokenizer.flush()  # quicker than an array

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """For one answer. Its first space stays, because it follows a prompt."""
        return Detokenizer(self._shown if skip_special_tokens else self._bytes.table)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> RenderedPrompt:
        """The prompt for a conversation; options as for ``ChatTemplate.prompt``.

        Raises RequestError when the model has no chat template or it refuses the messages.
        """
        if self._chat_template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions instead", "messages"
            )
        return self._chat_template.prompt(messages, **options)

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

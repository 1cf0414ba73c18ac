"""How many tokens an answer says that it took, from its last bytes. Pure."""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec
from attrs import frozen

_KEPT_BYTES = 8 << 10
"""The usage is the last of an answer, but for its closing brackets and an event that ends it."""
_USAGE = re.compile(rb'"usage"\s*:\s*(\{(?:[^{}]|\{[^{}]*\})*\})')
_EVENT = b"data:"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """As OpenAI's completions, chats and embeddings say it, and as responses and Anthropic do."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


@frozen
class Tokens:
    """Tokens of one request."""

    prompt: int
    cached: int
    generated: int


class UsageTail:
    """Keeps the end of an answer, and counts its events."""

    def __init__(self) -> None:
        self._tail = b""
        self._events = 0

    def take(self, piece: bytes) -> None:
        """The next bytes of the answer."""
        self._events += piece.count(_EVENT)
        last = piece if len(piece) >= _KEPT_BYTES else self._tail + piece
        self._tail = last[-_KEPT_BYTES:]

    def tokens(self, prompt: int) -> Tokens:
        """What the answer says.

        Where it says nothing: ``prompt`` tokens, and one for each event but the last, which says
        that nothing follows.
        """
        if found := _USAGE.findall(self._tail):
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                return _told(msgspec.json.decode(found[-1], type=_Usage), prompt)
        return Tokens(prompt, 0, max(0, self._events - 1))


def _told(usage: _Usage, prompt: int) -> Tokens:
    details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    asked = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
    made = usage.completion_tokens
    made = usage.output_tokens if made is None else made
    cached = details.cached_tokens
    cached = usage.cache_read_input_tokens if cached is None else cached
    asked, cached, made = (max(0, one or 0) for one in (asked or prompt, cached, made))
    return Tokens(asked, min(cached, asked), made)

"""Turns a stream of token ids into a stream of text, a whole character at a time."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen
from tokenizers import Tokenizer

from commutator.errors import ConfigError

__all__ = ["Detokenizer", "StopMatcher", "TokenBytes", "token_bytes"]

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
        return self._strip(self._decoder.decode(b"".join(map(table.__getitem__, token_ids))))

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


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Read the tokenizer's vocabulary through its decoder.

    Supports byte-level vocabularies, as of GPT-2, and SentencePiece ones with byte fallback; raises
    ConfigError for any other decoder.
    """
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None
    kinds = [step["type"] for step in _steps(decoder)]
    if "ByteLevel" in kinds:
        convert, leading_space = _byte_level_bytes, False
    elif "ByteFallback" in kinds:
        convert, leading_space = _byte_fallback_bytes, "Strip" in kinds
    else:
        raise ConfigError(
            [f"expected a byte-level or byte-fallback decoder, found {kinds or 'none'}"],
            "tokenizer",
        )
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = convert(token)
    return TokenBytes(tuple(table), leading_space)


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


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

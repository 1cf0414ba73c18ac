"""Maps token ids to the bytes that they stand for, so that text can be assembled exactly."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from attrs import frozen
from tokenizers import Tokenizer

from commutator.errors import ConfigError

__all__ = ["TokenBytes", "token_bytes"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


@frozen
class TokenBytes:
    """The bytes of every token, by id; an id without a token has none."""

    table: tuple[bytes, ...]
    leading_space: bool
    """A whole text begins with one space that was put there by the tokenizer (SentencePiece)."""


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Read the tokenizer's vocabulary through its decoder.

    Byte-level vocabularies (GPT-2 and its heirs) and SentencePiece ones with byte fallback are
    known; raises ConfigError for any other decoder.
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

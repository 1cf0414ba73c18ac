"""A tokenizer as llguidance takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import frozen


@frozen
class Vocabulary:
    """What grammars are compiled for."""

    tokenizer: str
    """The JSON of Hugging Face's `tokenizers`."""
    specials: Mapping[str, int]
    """The ids of special tokens, by what they are called: no text that a grammar allows."""


def vocabulary_of(tokenizer: str) -> Vocabulary:
    """``tokenizer`` with added tokens that are text, such as `</tool_call>`, as ordinary ones.

    llguidance takes all added tokens for special ones, which no text in a grammar matches; so a
    model would have to spell them.
    """
    read: dict[str, Any] = json.loads(tokenizer)
    added: list[dict[str, Any]] = read.get("added_tokens") or []
    known = read.get("model", {}).get("vocab")
    plain = [one for one in added if not one["special"] and one["content"].isascii()]
    if plain and isinstance(known, dict):
        # Also as a tokenizer of bytes writes it: most characters of ASCII stand for themselves.
        spaces = {" ": "\u0120", "\n": "\u010a", "\t": "\u0109"} if _is_of_bytes(read) else {}
        for one in plain:
            text = "".join(spaces.get(character, character) for character in one["content"])
            known.setdefault(text, one["id"])
        for one in added:  # without gaps, or the others get other ids
            known.setdefault(one["content"], one["id"])
        read["added_tokens"] = [one for one in added if one not in plain]
        tokenizer = json.dumps(read)
    return Vocabulary(
        tokenizer, {one["content"]: one["id"] for one in read.get("added_tokens") or []}
    )


def _is_of_bytes(read: Mapping[str, Any]) -> bool:
    return '"ByteLevel"' in json.dumps([read.get("decoder"), read.get("pre_tokenizer")])

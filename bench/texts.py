"""Texts of the kinds that prompts are made of, new ones at each call."""

from __future__ import annotations

import base64
import json
import random
import sysconfig
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

__all__ = ["KINDS", "VOCABULARY"]

VOCABULARY = """
    the of and to in is that for it as was with be by on not he his but at are this have from or
    had an they which one you were all her she there would their we him been has when who will no
    more if out so said what up its about than into them can only other time new some could these
    two may first then do any like my now over such our man me even most made after also did many
    off before must well back through years where much your way down should because long people
    each just state those mister how too little good world make very year still see work
"""
_WORDS = VOCABULARY.split()
_CHINESE = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过"
    "发后作里用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本"
    "前开但因只从想实日军者意无力它与长把机十民第公此已工使情明性知全三又关点正业外将两高间由问很"
)
_STOPS = "\uff0c\uff0c\uff0c\u3002\uff1b\uff01"
_LEVELS = ("DEBUG", "INFO", "INFO", "INFO", "WARNING", "ERROR")


@cache
def _english() -> str:
    """Python's own documentation of its language, about 700,000 characters."""
    return "\n".join(topics.values())


@cache
def _python() -> str:
    """The modules of the standard library that are single files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.py")))


def _part(text: str, chance: random.Random, characters: int) -> str:
    start = chance.randrange(len(text) - characters)
    return text[start : start + characters]


def _json(chance: random.Random) -> str:
    def record() -> dict[str, object]:
        return {
            "id": chance.getrandbits(48),
            "name": f"{chance.choice(_WORDS)}_{chance.choice(_WORDS)}",
            "tags": chance.choices(_WORDS, k=3),
            "price": round(chance.uniform(1, 9_999), 2),
            "active": chance.random() < 0.5,
            "address": {
                "street": chance.choice(_WORDS).title(),
                "zip": str(chance.randrange(10**5)),
            },
        }

    separators = (",", ":") if chance.random() < 0.5 else None  # as programs write it, or people
    return json.dumps([record() for _ in range(40)], separators=separators)


def _chinese(chance: random.Random) -> str:
    return "".join(
        "".join(chance.choices(_CHINESE, k=chance.randint(4, 16))) + chance.choice(_STOPS)
        for _ in range(170)
    )


def _words_with_digits(chance: random.Random) -> str:
    return " ".join(f"{chance.choice(_WORDS)}{chance.randrange(1_000)}" for _ in range(600))


def _log_lines(chance: random.Random) -> str:
    return "\n".join(
        f"2026-11-{chance.randint(1, 30):02}T{chance.randrange(24):02}:{chance.randrange(60):02}:"
        f"{chance.uniform(0, 60):06.3f}Z {chance.choice(_LEVELS)} [worker-{chance.randrange(64)}] "
        f"{chance.choice(_WORDS)}.{chance.choice(_WORDS)}: {' '.join(chance.choices(_WORDS, k=5))} "
        f"request={chance.getrandbits(64):016x} took={chance.uniform(0, 900):.1f}ms"
        for _ in range(40)
    )


def _base64(chance: random.Random) -> str:
    return base64.b64encode(chance.randbytes(2_400)).decode()


KINDS: Mapping[str, Callable[[random.Random], str]] = {
    "English": lambda chance: _part(_english(), chance, 14_000),
    "Python": lambda chance: _part(_python(), chance, 12_000),
    "JSON": _json,
    "Chinese": _chinese,
    "words with digits": _words_with_digits,
    "log lines": _log_lines,
    "base64": _base64,
}
"""By its name, what makes a text of the kind, of more than 2,200 of SmolLM2's tokens."""

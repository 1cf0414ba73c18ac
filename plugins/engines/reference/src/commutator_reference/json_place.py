"""Where in JSON an answer is, so that it ends: numbers have a bound, and what is open is closed."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MOST_DIGITS = 40
"""Of a number, in a row: no integer of 128 bits has more. Without a bound a small model writes
nothing else for ever."""
_CLOSING_TOKENS = 16
_TOKENS_A_LEVEL = 4
"""Tokens that are left for closing, in all and for each object or list that is open: a key that is
required, its value, and the bracket."""
_REPEATED, _LONGEST_REPEATED = 96, 32
"""Tokens in a row of which a block of so many at most is all: the model will not leave it."""
_LIKELY, _LIKELY_ENOUGH = 0.5, 0.02
"""How likely an end has to be for the model so that it is taken: with all of the last part of an
answer left, and with none."""
_QUOTE, _BACKSLASH = b'"\\'
_DIGITS = frozenset(b"0123456789")
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")
_IN_STRING = (re.compile(rb'"[\]}]*'),)
"""How close tokens bring the end, the closest first; all others are the last."""
_OUTSIDE = (
    re.compile(rb"[\]}]+"),
    re.compile(rb"[,:].*", re.DOTALL),
    re.compile(rb'""?'),
    re.compile(rb"[^\s\[{].*", re.DOTALL),
)


class JsonTokens:
    """The texts of a model's tokens, and what they do in JSON."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self.digits = np.fromiter((text[:1].isdigit() for text in texts), dtype=bool)
        self.zeros = np.fromiter((not text.strip(b"0") for text in texts), dtype=bool)
        self.zeros &= self.digits
        self.in_string = _ranks(texts, _IN_STRING)
        self.outside = _ranks(texts, _OUTSIDE)


def _ranks(texts: Sequence[bytes], kinds: Sequence[re.Pattern[bytes]]) -> NDArray[np.int8]:
    def rank(text: bytes) -> int:
        found = (number for number, kind in enumerate(kinds) if kind.fullmatch(text))
        return next(found, len(kinds))

    return np.fromiter(map(rank, texts), dtype=np.int8)


class JsonPlace:
    """One answer's."""

    def __init__(self, tokens: JsonTokens) -> None:
        self._tokens = tokens
        self._in_string = self._escaped = False
        self._digits = 0
        """Just written, of a number."""
        self._depth = 0
        self._newest: list[int] = []
        """Tokens, without those that are space between parts: it grows with the depth."""
        self.repeats = False
        """Whether the answer has said the same again and again."""

    def read(self, token_id: int) -> None:
        self._note(token_id)
        for byte in self._tokens.texts[token_id]:
            if self._in_string:
                ends = byte == _QUOTE and not self._escaped
                self._escaped = byte == _BACKSLASH and not self._escaped
                self._in_string = not ends
            else:
                self._in_string = byte == _QUOTE
                self._digits = self._digits + 1 if byte in _DIGITS else 0
                self._depth += (byte in _OPENING) - (byte in _CLOSING)

    def _note(self, token_id: int) -> None:
        if self.repeats or (not self._in_string and not self._tokens.texts[token_id].strip()):
            return
        self._newest = newest = [*self._newest[1 - _REPEATED :], token_id]
        self.repeats = len(newest) == _REPEATED and any(
            newest[-1 - length] == token_id and newest[length:] == newest[:-length]
            for length in range(1, _LONGEST_REPEATED + 1)
        )

    @property
    def closing_tokens(self) -> int:
        """With so few left what is open is closed."""
        return _CLOSING_TOKENS + _TOKENS_A_LEVEL * self._depth

    def is_space(self, token_id: int) -> bool:
        """Whether the token is space between parts, or begins with it."""
        return not self._in_string and self._tokens.texts[token_id][:1].isspace()

    def bounded(self, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Without further digits where there are enough and something else may follow.

        Where nothing may, as the number is no multiple of what it has to be, zeros make it one.
        """
        if self._digits < _MOST_DIGITS:
            return allowed
        for some in (~self._tokens.digits, self._tokens.zeros):
            fewer: NDArray[np.bool_] = allowed & some[: len(allowed)]
            if fewer.any():
                return fewer
        return allowed

    def likely_enough(self, left: int, last_part: int) -> float:
        """How likely an end has to be to be taken, with ``left`` of the ``last_part`` tokens."""
        others = last_part - self.closing_tokens
        part = min(max(left - self.closing_tokens, 0) / others, 1.0) if others > 0 else 0.0
        return float(_LIKELY_ENOUGH * (_LIKELY / _LIKELY_ENOUGH) ** part)

    def ending(self, allowed: NDArray[np.bool_], ends: Sequence[int]) -> NDArray[np.bool_]:
        """Those that end something: the answer, an object, a list or a text."""
        if self._escaped:
            return np.zeros_like(allowed)
        ranks = self._tokens.in_string if self._in_string else self._tokens.outside
        found: NDArray[np.bool_] = allowed & (ranks[: len(allowed)] == 0)
        found[ends] = allowed[ends]
        return found

    def closing(self, allowed: NDArray[np.bool_], ends: Sequence[int]) -> NDArray[np.bool_]:
        """Those that bring the end closest."""
        if self._escaped:
            return allowed
        ranks = self._tokens.in_string if self._in_string else self._tokens.outside
        ranks = ranks[: len(allowed)].copy()
        ranks[ends] = -1
        nearest = ranks[allowed].min(initial=np.iinfo(np.int8).max)
        nearer: NDArray[np.bool_] = allowed & (ranks == nearest)
        return nearer

"""Turns a stream of token ids into a stream of text, a whole character at a time."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence

__all__ = ["Detokenizer"]

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One generated sequence's text so far; each token costs time only once.

    The bytes of the tokens pass through an incremental UTF-8 decoder: an unfinished character
    waits for its next token, and an invalid one becomes U+FFFD as soon as that is certain.
    """

    def __init__(
        self,
        table: Sequence[bytes],
        *,
        skip_ids: Collection[int] = frozenset(),
        strip_space: bool = False,
    ) -> None:
        """``table`` holds the bytes by token id; ``strip_space`` drops one space at the start."""
        self._table = table
        self._skip_ids = skip_ids
        self._strip_space = strip_space
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; ids without a token add nothing."""
        table, skip_ids, count = self._table, self._skip_ids, len(self._table)
        data = b"".join([table[i] for i in token_ids if i not in skip_ids and 0 <= i < count])
        return self._strip(self._decoder.decode(data))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, or nothing."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

"""Tokenizes word by word, where that is exact, and remembers the words."""

from __future__ import annotations

from itertools import chain

from tokenizers import Tokenizer

from commutator.text.cut_points import CutPoints

__all__ = ["WordTokens"]

_LONGEST_WORD = 32
# An entry with such a word in the widest letters and a token for each; most take half of it.
_ENTRY_BYTES = 800


class WordTokens:
    """Tokens by word. Only for tokenizers whose texts may be cut before spaces.

    Added tokens, such as those between messages, begin words of their own. A known word costs a
    twentieth of what it costs to tokenize it, an unknown one twice as much. Threads may share it.
    """

    def __init__(self, tokenizer: Tokenizer, cuts: CutPoints, max_bytes: int) -> None:
        """``cuts`` are the tokenizer's. When ``max_bytes`` are full it begins anew."""
        self._tokenizer = tokenizer
        self._cuts = cuts
        self._max_entries = max_bytes // _ENTRY_BYTES
        self._known: dict[str, list[int]] = {}

    @property
    def size_bytes(self) -> int:
        return _ENTRY_BYTES * len(self._known)

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``, without special ones around it."""
        words = self._cuts.words(text)
        try:
            return list(chain.from_iterable(map(self._known.__getitem__, words)))
        except KeyError:
            return list(chain.from_iterable(self._learn(words)))

    def _learn(self, words: list[str]) -> list[list[int]]:
        known = self._known  # another thread may begin anew meanwhile
        missing = list({word: None for word in words if word not in known})
        encodings = self._tokenizer.encode_batch_fast(missing, add_special_tokens=False)
        learnt: dict[str, list[int]] = {}
        for word, encoding in zip(missing, encodings, strict=True):
            learnt[word] = encoding.ids
        tokens = [learnt[word] if word in learnt else known[word] for word in words]
        short = {word: ids for word, ids in learnt.items() if len(word) <= _LONGEST_WORD}
        if len(known) + len(short) > self._max_entries:
            self._known = {}
        if len(short) <= self._max_entries:
            self._known.update(short)
        return tokens

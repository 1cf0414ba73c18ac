"""Remembers the tokens of prompts' beginnings, so that a shared one is tokenized only once."""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from attrs import define, field, frozen
from tokenizers import Tokenizer

from commutator.tokenizer.cut_points import CutPoints, WordTokens, find_cut_points

__all__ = [
    "BlockHashing",
    "FoundPrefix",
    "PromptTokenCache",
    "PromptTokens",
    "cut_points_of",
]

_SHORTEST_CHUNK, _LONGEST_CHUNK = 100, 250


# A list entry and the int that it refers to; an entry of the cache without its contents.
_INT_BYTES = 40


_NODE_BYTES = 600


# Of the memory, the part for single words.
_FOR_WORDS = 1 / 8


# What is missing of a prompt is mostly its last words, and they are mostly known. A document that
# was never seen has too many others.
_BY_WORD_CHARACTERS = 1_000


@frozen
class BlockHashing:
    """How the sequence hashes of a prompt's blocks are made."""

    block_size: int
    """In tokens."""
    hashes: Callable[[Sequence[int], Sequence[int], str | None], list[int]]
    """Of (token ids, hashes of the first blocks as far as they are known, salt), those of all
    blocks."""


@frozen(eq=False)
class PromptTokens:
    """A tokenized prompt."""

    token_ids: list[int]
    sequence_hashes: list[int] | None
    """Of its full blocks; None when they were not asked for."""
    hit_tokens: int
    """The number of tokens that were cached."""


@define(eq=False)
class _Node:
    """A chunk of text behind all the chunks before it."""

    before: _Node | None
    """None: this is a root, which is before every first chunk."""
    chunk: str
    ahead: str
    """What the text has right behind, as far as the cut between depends on it."""
    token_ids: list[int]
    hashes: list[int]
    """Of the blocks that end in this chunk."""
    behind: dict[str, _Node] = field(factory=dict)
    """By their chunks."""
    latest: _Node | None = None
    """The last one of those that came: in a shared text it is the one that comes again."""

    @property
    def size_bytes(self) -> int:
        entries = len(self.token_ids) + len(self.hashes)
        texts = sys.getsizeof(self.chunk) + sys.getsizeof(self.ahead)
        return _NODE_BYTES + texts + _INT_BYTES * entries


@frozen(eq=False)
class FoundPrefix:
    """What is known of a prompt."""

    text: str
    salt: str | None
    """Only prompts of the same salt are looked at."""
    special: bool
    """Whether special tokens are put around the text."""
    nodes: list[_Node]
    """The root and the known chunks; empty when nothing is kept."""
    known_characters: int

    @property
    def missing_characters(self) -> int:
        """How much is still to be tokenized."""
        return len(self.text) - self.known_characters


def chunk_end(start: int) -> int:
    """A chunk from ``start`` ends at the first exact cut from here on.

    What follows the last known chunk is tokenized again, so chunks are short; each known one costs
    a look-up, so further on in the text, where there are many before, they are longer.
    """
    return start + min(_SHORTEST_CHUNK + start // 20, _LONGEST_CHUNK)


def cut_points_of(tokenizer: Tokenizer) -> CutPoints:
    """Where texts of this tokenizer may be cut."""
    if tokenizer.encode_special_tokens:
        return CutPoints(problem="it reads special tokens as plain text")
    try:
        description = json.loads(tokenizer.to_str())
    except Exception as error:  # noqa: BLE001 - the library raises nothing more precise
        return CutPoints(problem=f"it cannot be described: {error}")
    return find_cut_points(description)


class PromptTokenCache:
    """Tokens, and sequence hashes if wanted, by text prefix. Threads may share it.

    A prompt is cut into chunks at exact cuts, always the same way, and each chunk is kept under
    the ones before it. Each salt has chunks of its own, so that the time a prompt takes tells
    nothing about prompts of other salts. The least recently used go first; a chunk never before
    those after it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_bytes: int,
        *,
        hashing: BlockHashing | None = None,
        on_hit: Callable[[int], None] = lambda _: None,
    ) -> None:
        """With ``max_bytes`` 0 nothing is kept. ``on_hit`` is told each prompt's known tokens."""
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes - int(max_bytes * _FOR_WORDS)
        self._hashing = hashing
        self._on_hit = on_hit
        off = CutPoints(problem="it has no room for anything")
        self.cuts = cut_points_of(tokenizer) if max_bytes > 0 else off
        self._words = WordTokens(tokenizer, self.cuts, int(max_bytes * _FOR_WORDS))
        self._prefix_bytes = 0
        # Prompts that begin with special tokens have other blocks than those that do not.
        self._roots = {special: _Node(None, "", "", [], []) for special in (False, True)}
        # Each has the roots of the salts as what is behind it.
        self._salts = {special: _Node(None, "", "", [], []) for special in (False, True)}
        self._used: OrderedDict[_Node, None] = OrderedDict()
        """Least recently first; without ``_roots`` and ``_salts``."""
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """What it takes, at most the given ``max_bytes``."""
        return self._prefix_bytes + self._words.size_bytes

    def encode(
        self, text: str, salt: str | None = None, *, add_special_tokens: bool
    ) -> PromptTokens:
        """The prompt's tokens, equal to those without a cache."""
        return self.complete(self.look_up(text, salt, add_special_tokens=add_special_tokens))

    def look_up(
        self, text: str, salt: str | None = None, *, add_special_tokens: bool
    ) -> FoundPrefix:
        """What is known of the prompt; quick."""
        if not self.cuts.any:
            return FoundPrefix(text, salt, add_special_tokens, [], 0)
        start = 0
        with self._lock:
            node = self._root(salt, add_special_tokens)
            nodes = [node]
            while True:
                known = node.latest
                if (
                    known is None
                    or not text.startswith(known.chunk, start)
                    or not text.startswith(known.ahead, start + len(known.chunk))
                ):
                    cut = self.cuts.next_cut(text, chunk_end(start))
                    known = None if cut is None else node.behind.get(text[start:cut])
                    if known is None:
                        break
                    node.latest = known
                nodes.append(known)
                start += len(known.chunk)
                node = known
        return FoundPrefix(text, salt, add_special_tokens, nodes, start)

    def complete(self, found: FoundPrefix) -> PromptTokens:
        """Tokenize and hash what is missing, and keep it. Lets other threads run meanwhile."""
        if not self.cuts.any:
            return self._plain(found)
        token_ids: list[int] = []
        hashes: list[int] = []
        if found.special:
            token_ids.extend(self.cuts.first_ids)
        hit_tokens = -len(token_ids)
        for node in found.nodes:
            token_ids += node.token_ids
            hashes += node.hashes
        hit_tokens += len(token_ids)
        known_tokens = len(token_ids)
        chunks = self._chunks(found.text, found.known_characters)
        parts = self._tokenized(chunks, found.missing_characters)
        for part in parts:
            token_ids += part
        if found.special:
            token_ids.extend(self.cuts.last_ids)
        if self._hashing is not None:
            hashes = self._hashing.hashes(token_ids, hashes, found.salt)
        self._keep(found, known_tokens, chunks[:-1], parts, hashes)
        self._on_hit(hit_tokens)
        return PromptTokens(token_ids, hashes if self._hashing else None, hit_tokens)

    def _tokenized(self, chunks: list[str], characters: int) -> list[list[int]]:
        if self.cuts.before_spaces and characters <= _BY_WORD_CHARACTERS:
            return [self._words.encode(chunk) for chunk in chunks]
        encodings = self._tokenizer.encode_batch_fast(chunks, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _plain(self, found: FoundPrefix) -> PromptTokens:
        (encoding,) = self._tokenizer.encode_batch_fast(
            [found.text], add_special_tokens=found.special
        )
        token_ids: list[int] = encoding.ids
        hashes = None if self._hashing is None else self._hashing.hashes(token_ids, (), found.salt)
        return PromptTokens(token_ids, hashes, 0)

    def _root(self, salt: str | None, special: bool) -> _Node:
        special = special and bool(self.cuts.first_ids)
        if salt is None:
            return self._roots[special]
        salts = self._salts[special]
        root = salts.behind.get(salt)
        if root is None:
            root = salts.behind[salt] = _Node(salts, salt, "", [], [])
            self._used[root] = None
            self._prefix_bytes += root.size_bytes
        return root

    def _chunks(self, text: str, start: int) -> list[str]:
        """``text`` from ``start`` on; the last one ends with the text, not at a cut."""
        chunks = []
        while (cut := self.cuts.next_cut(text, chunk_end(start))) is not None:
            chunks.append(text[start:cut])
            start = cut
        chunks.append(text[start:])
        return chunks

    def _keep(
        self,
        found: FoundPrefix,
        known_tokens: int,
        chunks: Sequence[str],
        parts: Sequence[list[int]],
        hashes: Sequence[int],
    ) -> None:
        path = list(found.nodes)
        block_size = self._hashing.block_size if self._hashing else sys.maxsize
        tokens, at = known_tokens, found.known_characters
        with self._lock:
            for chunk, part in zip(chunks, parts, strict=False):
                blocks, tokens = tokens // block_size, tokens + len(part)
                at += len(chunk)
                before = path[-1]
                node = before.behind.get(chunk)
                if node is None:
                    ahead = found.text[at : self.cuts.certain_at(found.text, at)]
                    ended = list(hashes[blocks : tokens // block_size])
                    node = before.behind[chunk] = _Node(before, chunk, ahead, part, ended)
                    before.latest = node
                    self._used[node] = None
                    self._prefix_bytes += node.size_bytes
                path.append(node)
            # Backwards, so that what stands first in a prompt is the last to be dropped.
            for node in reversed(path):
                if node in self._used:  # another thread may have dropped it
                    self._used.move_to_end(node)
            while self._prefix_bytes > self._max_bytes:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest, _ = self._used.popitem(last=False)
        self._prefix_bytes -= oldest.size_bytes
        before = oldest.before
        assert before is not None
        del before.behind[oldest.chunk]
        if before.latest is oldest:
            before.latest = None

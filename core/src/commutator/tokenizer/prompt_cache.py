"""Remembers the tokens of prompts' beginnings, so that a shared one is tokenized only once."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence

from attrs import define, field, frozen

from commutator.tokenizer.cut_points import CutPoints
from commutator.tokenizer.encoder import Encoder

__all__ = [
    "BlockHashing",
    "FoundPrefix",
    "PromptTokenCache",
    "PromptTokens",
]

_SHORTEST_CHUNK = 200
# Looking a chunk up takes about as long as tokenizing a dozen characters.
_LOOK_UP_CHARACTERS = 12

# An entry of the cache without its contents, and a hash.
_CHUNK_BYTES = 400
_HASH_BYTES = 36

# One prompt in so many is also tokenized as a whole, by tokenizers itself.
_CHECK_EVERY = 1_000

# Characters between two places where a thread may turn to other work. By ``tokenizers`` itself,
# this takes about half a second at worst.
_STEP_CHARACTERS = 400_000


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


@frozen(eq=False)
class _Chunk:
    """A part of a text, behind all the chunks before it. Equal only to itself."""

    key: tuple[object, str]
    """What is before it, a chunk or what the first chunk's prompts share; and its text."""
    token_ids: list[int]
    """Made by ``_shared_ids``."""
    hashes: list[int]
    """Of the blocks that end in it."""

    @property
    def size_bytes(self) -> int:
        contents = (self.key[1], self.token_ids, self.hashes)
        hashes_bytes = _HASH_BYTES * len(self.hashes)
        return _CHUNK_BYTES + hashes_bytes + sum(map(sys.getsizeof, contents))


@define(eq=False)  # one is made for each request, and a frozen class takes twice as long to fill
class FoundPrefix:
    """What is known of a prompt."""

    text: str
    salt: str | None
    """Only prompts of the same salt are looked at."""
    special: bool
    """Whether special tokens are put around the text."""
    is_sample: bool
    """Whether its tokens are compared with those that ``tokenizers`` gives."""
    chunks: list[_Chunk] = field(factory=list)
    """The known ones."""
    known_characters: int = 0

    @property
    def missing_characters(self) -> int:
        """How much is still to be tokenized."""
        return len(self.text) - (0 if self.is_sample else self.known_characters)


def chunk_end(start: int) -> int:
    """A chunk from ``start`` ends at the first exact cut from here on.

    What follows the last known chunk is tokenized again, on average half a chunk, and each known
    one costs a look-up. The sum is least when chunks grow with the root of what is before them.
    """
    return start + max(_SHORTEST_CHUNK, math.isqrt(2 * _LOOK_UP_CHARACTERS * start))


class PromptTokenCache:
    """Tokens, and sequence hashes if wanted, by text prefix. Threads may share it.

    A prompt is cut into chunks at exact cuts, always the same way, and each chunk is kept under
    the ones before it. Each salt has chunks of its own, so that the time a prompt takes tells
    nothing about prompts of other salts. The least recently used go first; a chunk never before
    those after it.

    One prompt in 1,000, if it is not too long to be tokenized in one step, is compared with what
    ``tokenizers`` makes of the whole text. If they ever differ, that prompt gets the right tokens,
    and neither the cache nor the fast encoder is used again.
    """

    def __init__(
        self,
        encoder: Encoder,
        cuts: CutPoints,
        max_bytes: int,
        *,
        hashing: BlockHashing | None = None,
        on_hit: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``cuts`` are those of the encoder's tokenizer. With ``max_bytes`` 0 nothing is kept.

        ``on_hit`` is told each prompt's known tokens.
        """
        self._encoder = encoder
        self._cuts = cuts
        self._max_bytes = max_bytes
        self._hashing = hashing
        self._on_hit = on_hit
        self._prompts = itertools.count(1)
        self._chunks: OrderedDict[tuple[object, str], _Chunk] = OrderedDict()
        """Least recently used first."""
        self._size_bytes = 0
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """What it takes, at most the given ``max_bytes``."""
        return self._size_bytes

    def encode(
        self, text: str, salt: str | None = None, *, add_special_tokens: bool
    ) -> PromptTokens:
        """The prompt's tokens, equal to those without a cache.

        Raises RequestError for a text that can neither be divided nor be tokenized quickly.
        """
        return self.complete(self.look_up(text, salt, add_special_tokens=add_special_tokens))

    def look_up(
        self, text: str, salt: str | None = None, *, add_special_tokens: bool
    ) -> FoundPrefix:
        """What is known of the prompt; quick."""
        can_differ = self._encoder.is_fast or self._cuts.pattern is not None
        is_sample = (
            can_differ and next(self._prompts) % _CHECK_EVERY == 0 and len(text) <= _STEP_CHARACTERS
        )
        chunks: list[_Chunk] = []
        start = 0
        before: object = _root(salt, add_special_tokens)
        next_cut, known = self._cuts.next_cut, self._chunks
        while (cut := next_cut(text, chunk_end(start))) is not None:
            chunk = known.get((before, text[start:cut]))
            if chunk is None:
                break
            chunks.append(chunk)
            start, before = cut, chunk
        return FoundPrefix(text, salt, add_special_tokens, is_sample, chunks, start)

    def complete(self, found: FoundPrefix) -> PromptTokens:
        """Tokenize and hash what is missing, and keep it. Lets other threads run meanwhile.

        Raises RequestError as ``encode`` does.
        """
        steps = self.completing(found)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                prompt: PromptTokens = end.value
                return prompt

    def completing(self, found: FoundPrefix) -> Generator[None, None, PromptTokens]:
        """The same in steps of about a second at most. Each may run in another thread."""
        if self._cuts.pattern is None:
            (token_ids,) = self._encoder.encode([found.text], add_special_tokens=found.special)
            prompt = self._whole(found, token_ids)
        else:
            prompt = yield from self._completing(found)
        if found.is_sample:
            yield
            (exact,) = self._encoder.encode_exactly([found.text], add_special_tokens=found.special)
            if exact != prompt.token_ids:
                self._give_way(prompt.token_ids, exact)
                return self._whole(found, exact)
        return prompt

    def _completing(self, found: FoundPrefix) -> Generator[None, None, PromptTokens]:
        cuts, hashing = self._cuts, self._hashing
        token_ids: list[int] = [*cuts.first_ids] if found.special else []
        hashes: list[int] = []
        hit_tokens = -len(token_ids)
        for chunk in found.chunks:
            token_ids += chunk.token_ids
            hashes += chunk.hashes
        known_tokens = len(token_ids)
        hit_tokens += known_tokens
        texts = self._cut(found.text, found.known_characters)
        parts: list[list[int]] = []
        for step in _steps(texts):
            if parts:
                yield
            parts += self._encoder.encode(step, add_special_tokens=False)
        for part in parts:
            token_ids += part
        if found.special:
            token_ids += cuts.last_ids
        if hashing is not None:
            hashes = hashing.hashes(token_ids, hashes, found.salt)
        self._keep(found, known_tokens, texts[:-1], parts, hashes)
        self._on_hit(hit_tokens)
        return PromptTokens(token_ids, hashes if hashing else None, hit_tokens)

    def _whole(self, found: FoundPrefix, token_ids: list[int]) -> PromptTokens:
        hashes = None if self._hashing is None else self._hashing.hashes(token_ids, (), found.salt)
        return PromptTokens(token_ids, hashes, 0)

    def _cut(self, text: str, start: int) -> list[str]:
        """``text`` from ``start`` on; the last part ends with the text, not at a cut."""
        parts = []
        while (cut := self._cuts.next_cut(text, chunk_end(start))) is not None:
            parts.append(text[start:cut])
            start = cut
        parts.append(text[start:])
        return parts

    def _keep(
        self,
        found: FoundPrefix,
        known_tokens: int,
        texts: Sequence[str],
        parts: Sequence[list[int]],
        hashes: list[int],
    ) -> None:
        path = list(found.chunks)
        before: object = path[-1] if path else _root(found.salt, found.special)
        block_size = self._hashing.block_size if self._hashing else sys.maxsize
        tokens = known_tokens
        with self._lock:
            if self._cuts.pattern is None or not self._max_bytes:
                return  # another thread has found that the cache is wrong, or it is turned off
            for text, part in zip(texts, parts, strict=False):
                blocks, tokens = tokens // block_size, tokens + len(part)
                chunk = self._chunks.get((before, text))
                if chunk is None:  # no other thread was quicker
                    ended = hashes[blocks : tokens // block_size]
                    chunk = _Chunk((before, text), _shared_ids(part), ended)
                path.append(chunk)
                before = chunk
            # Backwards, so that what stands first in a prompt is the last to be dropped.
            for chunk in reversed(path):
                try:
                    self._chunks.move_to_end(chunk.key)
                except KeyError:  # it is new, or was dropped meanwhile
                    self._chunks[chunk.key] = chunk
                    self._size_bytes += chunk.size_bytes
            while self._size_bytes > self._max_bytes:
                _, oldest = self._chunks.popitem(last=False)
                self._size_bytes -= oldest.size_bytes

    def _give_way(self, found: list[int], exact: list[int]) -> None:
        at = next(
            (
                place
                for place, pair in enumerate(zip(found, exact, strict=False))
                if len({*pair}) > 1
            ),
            min(len(found), len(exact)),
        )
        with self._lock:
            self._cuts = CutPoints(problem="it gave other tokens than tokenizers")
            self._chunks.clear()
            self._size_bytes = 0
        self._encoder.give_way(
            f"a prompt of {len(exact)} tokens had others from number {at} on: {found[at : at + 3]} "
            f"instead of {exact[at : at + 3]}"
        )


def _steps(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in their order; several together only up to what one step may take."""
    step: list[str] = []
    characters = 0
    for text in texts:
        if step and characters + len(text) > _STEP_CHARACTERS:
            yield step
            step, characters = [], 0
        step.append(text)
        characters += len(text)
    yield step


def _root(salt: str | None, special: bool) -> tuple[str | None, bool]:
    """What is before the first chunk: prompts with special tokens around have other blocks."""
    return salt, special


_ids: list[int] = []
"""The integers from 0 on, as far as any cache holds them."""
_growing = threading.Lock()


def _shared_ids(token_ids: Sequence[int]) -> list[int]:
    """A list of the same ids that takes 8 bytes for each: equal ids are one object everywhere.

    Lists are put together five times as fast as arrays become one.
    """
    most = max(token_ids, default=-1)
    if most >= len(_ids):
        with _growing:
            _ids.extend(range(len(_ids), most + 1))
    return list(map(_ids.__getitem__, token_ids))

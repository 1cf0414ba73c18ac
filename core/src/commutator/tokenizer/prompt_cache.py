"""Remembers the tokens of prompts' beginnings, so that a shared one is tokenized only once."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence

from attrs import define, field, frozen

from commutator.tokenizer.cut_points import CutPoints
from commutator.tokenizer.encoder import Encoder, TokenIds

_SHORTEST_CHUNK = 200

# To keep a prompt's new end costs about as much as tokenizing this much of it; half of it on
# average is tokenized again by a prompt that goes on from there.
_LEAST_NEW_CHARACTERS = 800

# Most chunks in a node, so that the end of a long prompt can go before its beginning.
_NODE_CHUNKS = 64

# A node without its texts and numbers.
_NODE_BYTES = 700
_TOKEN_BYTES = 4

# One prompt in this number is also tokenized as a whole, by tokenizers itself.
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


@define(eq=False)  # a frozen class takes twice as long to fill
class PromptTokens:
    """A tokenized prompt."""

    token_ids: array[int]
    """Unsigned 32-bit integers."""
    sequence_hashes: list[int] | None
    """Of its full blocks; None when they were not asked for."""
    hit_tokens: int
    """The number of tokens that were cached."""


@define(eq=False)  # a frozen class takes twice as long to fill
class _Node:
    """Consecutive chunks of a text. Equal only to itself, and never changed."""

    key: tuple[object, int, str]
    """The node before it, or what the first nodes' prompts share; how many of that one's chunks are
    before it; and the text of its own first chunk."""
    text: str
    ids: bytes
    """32-bit integers."""
    hashes: array[int]
    """Of the blocks that end in it."""
    cuts: array[int]
    """For each chunk, the number of characters from the start of the node to the chunk's end."""
    ends: array[int]
    """The same in tokens."""

    @property
    def size_bytes(self) -> int:
        integers = self.hashes, self.cuts, self.ends
        numbers_bytes = len(self.ids) + sum(each.itemsize * len(each) for each in integers)
        return _NODE_BYTES + sys.getsizeof(self.text) + sys.getsizeof(self.key[2]) + numbers_bytes

    def shared_chunks(self, text: str, start: int) -> int:
        """How many of its chunks ``text``, which has the first one, has from ``start`` on."""
        if text.startswith(self.text, start):
            return len(self.cuts)
        cuts, shared, most = self.cuts, 1, len(self.cuts) - 1
        while shared < most:
            middle = (shared + most + 1) // 2
            equal = cuts[shared - 1]
            if text.startswith(self.text[equal : cuts[middle - 1]], start + equal):
                shared = middle
            else:
                most = middle - 1
        return shared


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
    path: list[tuple[_Node, int]] = field(factory=list)
    """The nodes with its beginning, and how many chunks of each are its own."""
    known_characters: int = 0

    @property
    def missing_characters(self) -> int:
        """How much is still to be tokenized."""
        return len(self.text) - (0 if self.is_sample else self.known_characters)


def chunk_end(start: int) -> int:
    """A chunk from ``start`` ends at the first exact cut from here on.

    What follows the last known chunk is tokenized again, on average half a chunk, and each new one
    has to be cut. The sum is least when chunks grow with the root of what is before them.
    """
    return start + max(_SHORTEST_CHUNK, 2 * math.isqrt(start))


class PromptTokenCache:
    """Tokens, and sequence hashes if wanted, by text prefix. Threads may share it.

    A prompt is cut into chunks at exact cuts, always the same way. Chunks that were new together
    are one node of a tree, from which a later prompt may branch off after each of them: so a known
    beginning is a few nodes, each compared as a whole. Each salt has a tree of its own, so that the
    time a prompt takes tells nothing about prompts of other salts. The least recently used nodes go
    first; a node never before those after it.

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
        self._around = [array("I", ids).tobytes() for ids in (cuts.first_ids, cuts.last_ids)]
        self._block_size = hashing.block_size if hashing else sys.maxsize
        self._on_hit = on_hit
        self._prompts = itertools.count(1)
        self._nodes: OrderedDict[tuple[object, int, str], _Node] = OrderedDict()
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
        cuts = self._cuts
        is_sample = (
            next(self._prompts) % _CHECK_EVERY == 0
            and len(text) <= _STEP_CHARACTERS
            and (self._encoder.is_fast or cuts.pattern is not None)
        )
        path: list[tuple[_Node, int]] = []
        start = chunks = 0
        before: object = _root(salt, add_special_tokens)
        while (cut := cuts.next_cut(text, chunk_end(start))) is not None:
            node = self._nodes.get((before, chunks, text[start:cut]))
            if node is None:
                break
            chunks = node.shared_chunks(text, start)
            # What stands after a cut counts, too, and may differ for the last one.
            if not cuts.is_cut(text, start + node.cuts[chunks - 1]):
                chunks -= 1
            path.append((node, chunks))
            start += node.cuts[chunks - 1]
            before = node
        return FoundPrefix(text, salt, add_special_tokens, is_sample, path, start)

    def complete(self, found: FoundPrefix) -> PromptTokens:
        """Tokenize and hash what is missing, and keep it. Lets other threads run meanwhile.

        Raises RequestError as ``encode`` does.
        """
        one_step = not found.is_sample and found.missing_characters <= _STEP_CHARACTERS
        if one_step and self._cuts.pattern is not None:
            texts = self._cut(found.text, found.known_characters)
            new = self._encoder.encode(texts, add_special_tokens=False)
            return self._completed(found, new, texts[:-1])
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
            whole = self._encoder.encode([found.text], add_special_tokens=found.special)
            prompt = self._prompt(found, whole.data)
        else:
            prompt = yield from self._completing(found)
        if found.is_sample:
            yield
            exact = self._encoder.encode_exactly([found.text], add_special_tokens=found.special)
            right = self._prompt(found, exact.data)
            if right.token_ids != prompt.token_ids:
                self._give_way(prompt.token_ids, right.token_ids)
                return right
        return prompt

    def _completing(self, found: FoundPrefix) -> Generator[None, None, PromptTokens]:
        texts = self._cut(found.text, found.known_characters)
        parts: list[TokenIds] = []
        for step in _steps(texts):
            if parts:
                yield
            parts.append(self._encoder.encode(step, add_special_tokens=False))
        return self._completed(found, TokenIds.joined(parts), texts[:-1])

    def _completed(self, found: FoundPrefix, new: TokenIds, texts: Sequence[str]) -> PromptTokens:
        """``new`` are the missing tokens; those of ``texts``, chunks at their start, are kept."""
        first, last = self._around if found.special else (b"", b"")
        data, hashes = [first], array("Q")
        tokens = len(first) // _TOKEN_BYTES
        for node, chunks in found.path:
            end = node.ends[chunks - 1]
            data.append(node.ids[: _TOKEN_BYTES * end])
            tokens += end
            if self._hashing is not None:
                hashes += node.hashes[: tokens // self._hashing.block_size - len(hashes)]
        data += new.data, last
        prompt = self._prompt(found, b"".join(data), hashes, tokens - len(first) // _TOKEN_BYTES)
        path = [node for node, _ in found.path]
        if texts:
            path += self._new_nodes(found, tokens, texts, new, prompt.sequence_hashes)
        if path:
            self._keep(path)
        self._on_hit(prompt.hit_tokens)
        return prompt

    def _prompt(
        self,
        found: FoundPrefix,
        data: bytes,
        known_hashes: Sequence[int] = (),
        hit_tokens: int = 0,
    ) -> PromptTokens:
        ids, hashing = array("I", data), self._hashing
        hashes = None if hashing is None else hashing.hashes(ids, known_hashes, found.salt)
        return PromptTokens(ids, hashes, hit_tokens)

    def _cut(self, text: str, start: int) -> list[str]:
        """``text`` from ``start`` on; the last part ends with the text, not at a cut."""
        if len(text) - start < _LEAST_NEW_CHARACTERS:
            return [text[start:]]
        parts = []
        while (cut := self._cuts.next_cut(text, chunk_end(start))) is not None:
            parts.append(text[start:cut])
            start = cut
        parts.append(text[start:])
        return parts

    def _new_nodes(
        self,
        found: FoundPrefix,
        known_tokens: int,
        texts: Sequence[str],
        new: TokenIds,
        hashes: Sequence[int] | None,
    ) -> list[_Node]:
        """Nodes for a prompt's new chunks.

        They have these ``texts`` and the first tokens of ``new``; ``hashes`` are the prompt's.
        """
        before, chunks = found.path[-1] if found.path else (_root(found.salt, found.special), 0)
        nodes: list[_Node] = []
        for low in range(0, len(texts), _NODE_CHUNKS):
            part = texts[low : low + _NODE_CHUNKS]
            first, *ends = new.offsets[low : low + len(part) + 1]
            blocks = slice(
                (known_tokens + first) // self._block_size,
                (known_tokens + ends[-1]) // self._block_size,
            )
            node = _Node(
                (before, chunks, part[0]),
                "".join(part),
                new.data[_TOKEN_BYTES * first : _TOKEN_BYTES * ends[-1]],
                array("Q", hashes[blocks] if hashes else ()),
                array("I", itertools.accumulate(map(len, part))),
                array("I", [end - first for end in ends]),
            )
            nodes.append(node)
            before, chunks = node, len(part)
        return nodes

    def _keep(self, path: Sequence[_Node]) -> None:
        nodes = self._nodes
        with self._lock:
            if self._cuts.pattern is None or not self._max_bytes:
                return  # another thread has found that the cache is wrong, or it is turned off
            for depth, node in enumerate(path):
                kept = nodes.get(node.key)
                if kept is None:  # it is new, or was dropped meanwhile
                    nodes[node.key] = node
                    self._size_bytes += node.size_bytes
                elif kept is not node:  # another thread was quicker
                    path = path[:depth]
                    break
            # Backwards, so that what stands first in a prompt is the last to be dropped.
            for node in reversed(path):
                nodes.move_to_end(node.key)
            while self._size_bytes > self._max_bytes:
                _, oldest = nodes.popitem(last=False)
                self._size_bytes -= oldest.size_bytes

    def _give_way(self, found: Sequence[int], exact: Sequence[int]) -> None:
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
            self._nodes.clear()
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

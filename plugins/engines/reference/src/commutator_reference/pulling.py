"""The decode side of hand-overs: a request waits until its prompt's blocks are fetched.

On the engine's thread, all of it. The bytes are moved on another one meanwhile.
"""

from __future__ import annotations

from attrs import define, field

from commutator.engine.handover import BlockShapes, DecodeWords, PullOver, Target
from commutator_reference.blocks import BlockPool
from commutator_reference.handover import Handover
from commutator_reference.sequence import Sequence

__all__ = ["Pulling"]


@define
class _Pull:
    sequence: Sequence
    shapes: BlockShapes
    first: int = 0
    """Position of the first block that is fetched."""
    chain: list[int] = field(factory=list)
    """Registered blocks from the prompt's first, held meanwhile, in order."""
    blocks: list[int] = field(factory=list)
    """Where the rest is fetched to; also those that ``chain`` has by then."""
    over: PullOver | None = None

    @property
    def aimed(self) -> bool:
        return bool(self.blocks)


class Pulling:
    """Between the scheduler's pool and the decode side's hand-overs."""

    def __init__(self, handover: Handover, pool: BlockPool) -> None:
        self._handover = handover
        self._puller = handover.pulls
        self._pool = pool
        self._pulls: dict[int, _Pull] = {}
        """Of requests that wait, and of those whose blocks are not let go yet."""
        self._gone: set[int] = set()
        """Requests that ended while something may still write to their blocks."""

    def begin(self, sequence: Sequence, words: DecodeWords) -> None:
        """Ask the prefill worker, before there is room for the answer."""
        info = self._handover.info
        shapes = BlockShapes(words.block_size, info.block_size, info.token_bytes)
        self._pulls[sequence.key] = _Pull(sequence, shapes)
        self._puller.begin(sequence.key, words, sequence.request)

    def ready(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether the request can be admitted; says where its blocks are to go."""
        pull = self._pulls.get(sequence.key)
        if pull is None:
            return True
        if pull.over is not None or pull.aimed:
            return pull.over is not None and pull.over.error is None
        size = self._pool.block_size
        first = pull.shapes.aligned(len(hits) * size)
        end = pull.shapes.aligned(len(sequence.tokens) - 1)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = len(hits) * size
        if first >= end:
            self._puller.drop(sequence.key)
            del self._pulls[sequence.key]
            return True
        chain = hits[: first // size]
        for block in chain:
            self._pool.acquire(block)
        blocks = self._pool.allocate((end - first) // size)
        if blocks is None:
            self._pool.release(chain)
            return False
        pull.chain, pull.first, pull.blocks = chain, first // size, blocks
        self._puller.aim(sequence.key, Target(first, end, tuple(blocks)))
        return False

    def drop(self, key: int) -> None:
        """The request is gone; its blocks come back when nothing writes to them."""
        pull = self._pulls.get(key)
        if pull is None:
            return
        self._puller.drop(key)
        if pull.aimed:
            self._gone.add(key)
        else:
            del self._pulls[key]

    def update(self) -> list[tuple[int, str]]:
        """Once a step: take what has arrived. Returns requests that cannot go on, and why."""
        over, let_go = self._puller.poll()
        failed: list[tuple[int, str]] = []
        for each in over:
            pull = self._pulls.get(each.key)
            if pull is None or each.key in self._gone:
                continue
            pull.over = each
            self._register(pull, each.good_tokens // self._pool.block_size)
            if each.error is not None:
                failed.append((each.key, each.error))
            elif not pull.aimed:
                del self._pulls[each.key]
        for key in let_go:
            if (pull := self._pulls.pop(key, None)) is not None:
                self._gone.discard(key)
                spare = set(pull.blocks).difference(pull.chain)
                # In the order of the tokens, so that no block is given away before its child.
                self._pool.release([*pull.chain, *spare])
        return failed

    def held_blocks(self) -> set[int]:
        """Blocks that are held for hand-overs."""
        return {block for pull in self._pulls.values() for block in (*pull.chain, *pull.blocks)}

    def give_up(self) -> None:
        """The pool's books are broken: nothing is fetched any more. See ``settled``."""
        for key in list(self._pulls):
            if key not in self._gone:
                self.drop(key)

    def settled(self) -> bool:
        """After ``give_up``, instead of ``update``: whether nothing writes to the arena."""
        _, let_go = self._puller.poll()
        for key in let_go:
            self._pulls.pop(key, None)
            self._gone.discard(key)
        return not self._pulls

    def _register(self, pull: _Pull, count: int) -> None:
        size = self._pool.block_size
        for index in range(count):
            identity = pull.sequence.identity(pull.first + index, size)
            twin = self._pool.find(identity)
            if twin is not None:
                self._pool.acquire(twin)  # it came here another way meanwhile
            else:
                facts = pull.sequence.facts(pull.first + index, size)
                self._pool.register(pull.blocks[index], identity, facts)
            pull.chain.append(pull.blocks[index] if twin is None else twin)

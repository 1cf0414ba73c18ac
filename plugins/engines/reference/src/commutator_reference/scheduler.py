"""Decides what each step computes: continuous batching over a fixed number of KV blocks.

Pure: no tensors, no clock. The engine calls ``schedule``, runs the step, and reports
with ``complete`` and ``remove``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Protocol

from attrs import define, evolve, field, frozen

from commutator import BlockKey, GenerateRequest, TokenLogprob
from commutator.contract.block import (
    BlockDescriptor,
    CacheIdentity,
    next_key,
    retention_hints,
)
from commutator_reference.block_pool import BlockPool
from commutator_reference.constraints import Matcher

__all__ = ["ANONYMOUS", "BlockLoads", "Chunk", "Scheduler", "Sequence", "Step"]

ANONYMOUS = CacheIdentity(model="", weights="", tokenizer="", dtype="", layout="", block_size=0)
"""Enough where blocks never leave the engine."""


class BlockLoads(Protocol):
    """Blocks loaded from elsewhere before a request is admitted, or held for other workers."""

    def ready(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether to admit it now, with the blocks ``hits`` in the pool; False: call again."""

    def drop(self, key: int) -> None:
        """The request ended."""


@define(eq=False)
class Sequence:
    """Prompt and output tokens with the blocks that hold their KV.

    The KV of the newest token is computed in the step that samples the next one, so a sequence
    that decodes has exactly one token more than ``computed``.
    """

    key: int
    request: GenerateRequest
    arrival: int
    tokens: list[int]
    """The prompt, then the output."""
    prompt_length: int
    """The prompt's length, without tokens that another worker generated."""
    seed: int
    namespace: BlockKey
    """The parent of its first block; requests with the same adapter and salt share KV blocks."""
    computed: int = 0
    """Leading tokens whose KV is in the blocks."""
    blocks: list[int] = field(factory=list)
    descriptors: list[BlockDescriptor] = field(factory=list)
    """Those of the leading full blocks that were asked for so far."""
    registered: int = 0
    """Leading blocks that are in the prefix cache."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at the first admission."""
    tiers_asked: bool = False
    """Whether its blocks in storage tiers were loaded, or need not be."""
    started: bool = False
    """Whether a delta has been emitted."""
    loads: list[BlockLoads] = field(factory=list)
    """What has a part in this request, in the order in which it is asked."""
    matcher: Matcher | None = None
    """What the answer follows, at its newest token."""
    bad_words: Many[Many[int]] = ()
    """The tokens of each word that must not be generated."""
    prompt_logprobs: list[TokenLogprob] = field(factory=list)
    """Those that are wanted, as far as they were computed."""

    @classmethod
    def start(
        cls,
        key: int,
        request: GenerateRequest,
        arrival: int,
        seed: int,
        base: CacheIdentity = ANONYMOUS,
    ) -> Sequence:
        """A sequence that has not been scheduled yet."""
        return cls(
            key,
            request,
            arrival,
            tokens=list(request.token_ids),
            prompt_length=len(request.token_ids) - request.generated_prefix,
            seed=seed,
            namespace=evolve(
                base, adapter=request.adapter_digest, cache_salt=request.cache_salt
            ).digest,
        )

    @property
    def output_length(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: lower priority value first, then first come, first served."""
        return self.request.priority, self.arrival

    def descriptor(self, index: int, block_size: int) -> BlockDescriptor:
        """Full block ``index``, with the client's wishes; made once, survives preemption."""
        request = self.request
        while (depth := len(self.descriptors)) <= index:
            parent = self.descriptors[-1].key if self.descriptors else None
            token_ids = tuple(self.tokens[depth * block_size : (depth + 1) * block_size])
            self.descriptors.append(
                BlockDescriptor(
                    key=next_key(parent or self.namespace, token_ids),
                    parent=parent,
                    token_ids=token_ids,
                    facts=retention_hints(
                        depth, block_size, self.prompt_length, request.cache_salt, request.retention
                    ),
                    adapter=request.adapter_digest,
                )
            )
        return self.descriptors[index]

    def reusable(self, block_size: int) -> list[BlockDescriptor]:
        """The full blocks that need not be computed if they are cached somewhere.

        The last token is always computed: the next one is sampled from its logits. Where log
        probabilities of the prompt are wanted, all of it is.
        """
        if self.request.prompt_logprobs is not None and not self.output_length:
            return []
        count = (len(self.tokens) - 1) // block_size
        if count > len(self.descriptors):
            self.descriptor(count - 1, block_size)
        return self.descriptors[:count]


@frozen
class Chunk:
    """Consecutive tokens of one request whose KV is to be computed."""

    key: int
    token_ids: tuple[int, ...]
    start: int
    """Position of the first of these tokens in its sequence."""
    block_table: tuple[int, ...]
    """Blocks of the sequence, in order; block i holds positions [i * size, (i + 1) * size)."""
    samples: bool
    """Whether the sequence ends here, so that its next token is to be chosen."""
    scores: bool = False
    """Whether log probabilities of the prompt are wanted."""
    others: tuple[tuple[int, ...], ...] = ()
    """As ``block_table``, of the groups of KV after the first."""

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """Of each group of KV."""
        return self.block_table, *self.others

    @property
    def end(self) -> int:
        """Position after the last of these tokens."""
        return self.start + len(self.token_ids)


@frozen
class Step:
    """The chunks of one forward pass, those of a single token first."""

    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[int, ...] = ()
    """Requests that lost their blocks to make room; they are waiting again."""

    def without(self, keys: Iterable[int]) -> Step:
        """The same step without the chunks of some requests."""
        gone = set(keys)
        return evolve(self, chunks=tuple(c for c in self.chunks if c.key not in gone))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of chunks with more than one."""
        return sum(len(c.token_ids) for c in self.chunks if len(c.token_ids) > 1)


class Scheduler:
    """Running requests first, decodes before prefills; then admission in order of rank.

    When blocks run out, the running request of the last rank releases all of its blocks and waits
    to be computed again, including the tokens generated so far. The first rank always proceeds, so
    every request ends, provided that each fits into the pool alone (``max_model_len``).
    """

    def __init__(
        self,
        pool: BlockPool,
        max_model_len: int,
        *,
        max_running_requests: int,
        max_tokens_per_step: int,
    ) -> None:
        capacity = pool.num_blocks * pool.block_size
        if not 2 <= max_model_len <= capacity:  # noqa: PLR2004 - one token in, one out
            raise ValueError(
                f"max_model_len is {max_model_len}: expected 2 to {capacity}, the tokens that "
                f"{pool.num_blocks} blocks of {pool.block_size} hold"
            )
        self.pool = pool
        self.max_model_len = max_model_len
        self.preemptions = 0
        """How often a request has lost its blocks."""
        self._max_tokens = max_tokens_per_step
        # A step must have a token for each running request, or the last of them would starve.
        self._max_running = min(max_running_requests, max_tokens_per_step)
        self._sequences: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._waiting: list[Sequence] = []

    @property
    def running(self) -> int:
        """How many requests hold blocks."""
        return len(self._running)

    @property
    def queue(self) -> Many[Sequence]:
        """The requests that wait, in the order in which they will be admitted."""
        return self._waiting

    def get(self, key: int) -> Sequence | None:
        """The live request, or None."""
        return self._sequences.get(key)

    def add(self, sequence: Sequence) -> None:
        """Take a request whose prompt plus one token is at most ``max_model_len``."""
        if sequence.key in self._sequences:
            raise ValueError(f"key {sequence.key} is in use")
        if not 1 <= sequence.prompt_length < self.max_model_len:
            raise ValueError(f"a prompt of {sequence.prompt_length} tokens cannot be scheduled")
        self._sequences[sequence.key] = sequence
        insort(self._waiting, sequence, key=_rank)

    def remove(self, key: int) -> bool:
        """Remove a finished or aborted request and release its blocks. False if unknown."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return False
        for load in sequence.loads:
            load.drop(key)
        if self._running.pop(key, None) is None:
            del self._waiting[bisect_left(self._waiting, sequence.rank, key=_rank)]
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        return True

    def schedule(self) -> Step:
        """The next step; without chunks if no request is live, or all wait for blocks."""
        plan: dict[int, int] = {}
        preempted = self._plan_running(plan)
        if not preempted:
            self._plan_admissions(plan)
        chunks = [self._chunk(self._running[key], count) for key, count in plan.items()]
        chunks.sort(key=lambda chunk: len(chunk.token_ids) > 1)
        return Step(tuple(chunks), tuple(preempted))

    def complete(self, step: Step) -> None:
        """The step's KV is in the arena: full blocks can be reused from now on."""
        for chunk in step.chunks:
            sequence = self._running[chunk.key]
            sequence.computed = chunk.end
            if self.pool.prefix_caching:
                self._register_full_blocks(sequence)

    def _plan_running(self, plan: dict[int, int]) -> list[int]:
        budget, preempted = self._max_tokens, list[int]()
        decodes_first = sorted(self._running.values(), key=lambda s: (s.uncomputed > 1, s.rank))
        for sequence in decodes_first:
            if budget == 0:
                break
            if sequence.key not in self._running:
                continue
            count = min(sequence.uncomputed, budget)
            while not self._grow(sequence, count):
                victim = max(self._running.values(), key=_rank)
                if victim is sequence:
                    break  # it keeps its blocks until a request of a better rank needs them
                self._preempt(victim)
                preempted.append(victim.key)
                budget += plan.pop(victim.key, 0)
            else:
                plan[sequence.key] = count
                budget -= count
        return preempted

    def _plan_admissions(self, plan: dict[int, int]) -> None:
        budget = self._max_tokens - sum(plan.values())
        position = 0
        while (
            position < len(self._waiting) and budget > 0 and len(self._running) < self._max_running
        ):
            sequence = self._waiting[position]
            hits: list[int] = []
            if self.pool.prefix_caching:
                hits = self.pool.find_prefix(sequence.reusable(self.pool.block_size))
            if not self._has_room_for(sequence, hits):
                break
            if not all(load.ready(sequence, hits) for load in sequence.loads):
                position += 1  # others continue while its blocks are on their way
                continue
            del self._waiting[position]
            self._running[sequence.key] = sequence
            for index, block in enumerate(hits):
                self.pool.reuse(block)
                if sequence.request.retention:
                    self.pool.keep(block, sequence.descriptor(index, self.pool.block_size).facts)
            sequence.blocks = hits
            sequence.registered = len(hits)
            sequence.computed = len(hits) * self.pool.block_size
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
            count = min(sequence.uncomputed, budget)
            grown = self._grow(sequence, count)
            assert grown, "_has_room_for promised these blocks"
            plan[sequence.key] = count
            budget -= count

    def _has_room_for(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether all of its tokens fit beside the blocks that running requests still need.

        One block of headroom for each running request keeps a newcomer from being admitted only
        to be preempted a few tokens later.
        """
        owed = sum(
            self._blocks_for(len(running.tokens)) - len(running.blocks) + 1
            for running in self._running.values()
        )
        revived = sum(not self.pool.in_flight(block) for block in hits)
        needed = self._blocks_for(len(sequence.tokens)) - len(hits)
        return needed + revived + owed <= self.pool.available

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Give the sequence the blocks that its next ``count`` tokens need, if there are any."""
        missing = self._blocks_for(sequence.computed + count) - len(sequence.blocks)
        blocks = self.pool.allocate(max(0, missing))
        if blocks is None:
            return False
        sequence.blocks += blocks
        return True

    def _preempt(self, victim: Sequence) -> None:
        del self._running[victim.key]
        self.pool.release(victim.blocks)
        victim.blocks, victim.computed, victim.registered = [], 0, 0
        victim.tiers_asked = False
        insort(self._waiting, victim, key=_rank)
        self.preemptions += 1

    def _register_full_blocks(self, sequence: Sequence) -> None:
        full = sequence.computed // self.pool.block_size
        for index in range(sequence.registered, full):
            content = sequence.descriptor(index, self.pool.block_size)
            sequence.blocks[index] = self.pool.register(sequence.blocks[index], content)
        sequence.registered = max(sequence.registered, full)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    @staticmethod
    def _chunk(sequence: Sequence, count: int) -> Chunk:
        end = sequence.computed + count
        return Chunk(
            sequence.key,
            tuple(sequence.tokens[sequence.computed : end]),
            sequence.computed,
            tuple(sequence.blocks),
            samples=end == len(sequence.tokens),
            scores=sequence.request.prompt_logprobs is not None and not sequence.output_length,
        )


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank

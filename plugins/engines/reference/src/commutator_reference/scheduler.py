"""Decides what each step computes: continuous batching over a fixed number of KV blocks.

Pure: no tensors, no clock. The engine calls ``schedule``, runs the step, and reports
with ``complete`` and ``remove``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Protocol

from attrs import define, evolve, field, frozen

from commutator import BlockKey, GenerateRequest, TokenLogprob
from commutator.contract.block import (
    BlockDescriptor,
    CacheIdentity,
    RetentionHints,
    next_key,
    retention_hints,
)
from commutator_engine_kit.kv import (
    KvGroup,
    KvKind,
    announced_group,
    group_identities,
    is_behind,
    usable_boundary,
    whole,
)
from commutator_reference.block_pool import NOTHING, BlockPool
from commutator_reference.constraints import Matcher

if TYPE_CHECKING:
    from commutator_reference.lora import LoraAdapter

ANONYMOUS = CacheIdentity(model="", weights="", tokenizer="", dtype="", layout="", block_size=0)
"""Enough where blocks never leave the engine."""


@frozen
class Hits:
    """What the pool has of a prompt: all that each group of KV needs at ``tokens``."""

    tokens: int
    """From where the prompt is to be computed."""
    tables: list[list[int]]
    """The blocks of each group, from the prompt's first; NOTHING where none is needed."""

    @property
    def blocks(self) -> list[int]:
        """Those of the first group."""
        return self.tables[0]


class BlockLoads(Protocol):
    """Blocks loaded from elsewhere before a request is admitted, or held for other workers."""

    def ready(self, sequence: Sequence, hits: Hits) -> bool:
        """Whether to admit it now, with ``hits`` of the pool; False: call again."""

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
    namespaces: Many[BlockKey]
    """The parent of its first block in each group of KV; requests with the same adapter and salt
    share blocks."""
    groups: Many[KvGroup] = field(factory=lambda: whole(1))
    """The model's kinds of KV."""
    computed: int = 0
    """Leading tokens whose KV is in the blocks."""
    tables: list[list[int]] = field(init=False)
    """The blocks of each group, in order; NOTHING for those behind its window."""
    descriptors: list[list[BlockDescriptor]] = field(init=False)
    """Of each group, those of the leading full blocks that were asked for so far."""
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
    adapter: LoraAdapter | None = None
    """What is added to the model's weights for it."""
    prompt_logprobs: list[TokenLogprob] = field(factory=list)
    """Those that are wanted, as far as they were computed."""

    def __attrs_post_init__(self) -> None:
        self.tables = [[] for _ in self.groups]
        self.descriptors = [[] for _ in self.groups]

    @property
    def blocks(self) -> list[int]:
        """Those of the first group."""
        return self.tables[0]

    @classmethod
    def start(
        cls,
        key: int,
        request: GenerateRequest,
        arrival: int,
        seed: int,
        base: CacheIdentity = ANONYMOUS,
        groups: Many[KvGroup] = (),
    ) -> Sequence:
        """A sequence that has not been scheduled yet. Without ``groups``, the model has one."""
        groups = groups or whole(1)
        base = evolve(base, adapter=request.adapter_digest, cache_salt=request.cache_salt)
        return cls(
            key,
            request,
            arrival,
            tokens=list(request.token_ids),
            prompt_length=len(request.token_ids) - request.generated_prefix,
            seed=seed,
            namespaces=[each.digest for each in group_identities(base, groups)],
            groups=groups,
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

    def descriptor(self, index: int, block_size: int, group: int = 0) -> BlockDescriptor:
        """A group's full block, with the client's wishes; made once, survives preemption.

        Routers follow one group: blocks of others have no tokens; KV events name those of windows
        and states by the followed group's.
        Blocks that stand for themselves, as they need none before them, have no parent.
        """
        request, known = self.request, self.descriptors[group]
        follows = self.groups[group].keeps_prefix
        followed = announced_group(self.groups)
        while (depth := len(known)) <= index:
            before = known[-1].key if known else None
            token_ids = tuple(self.tokens[depth * block_size : (depth + 1) * block_size])
            known.append(
                BlockDescriptor(
                    key=next_key(before or self.namespaces[group], token_ids),
                    parent=before if follows else None,
                    token_ids=token_ids if group == followed else (),
                    stands_beside=None
                    if follows or followed is None
                    else self.descriptor(depth, block_size, followed).key,
                    group=group,
                    facts=self._facts(depth, block_size, group),
                    adapter=request.adapter_digest,
                )
            )
        return known[index]

    def _facts(self, depth: int, block_size: int, group: int) -> RetentionHints:
        request, length = self.request, self.prompt_length
        facts = retention_hints(depth, block_size, length, request.cache_salt, request.retention)
        behind = is_behind(self.groups[group], depth, length, block_size)
        return evolve(facts, behind=True) if behind else facts

    def reusable(self, block_size: int, group: int = 0) -> list[BlockDescriptor]:
        """The full blocks that need not be computed if they are cached somewhere.

        The last token is always computed: the next one is sampled from its logits. Where log
        probabilities of the prompt are wanted, all of it is.
        """
        if self.request.prompt_logprobs is not None and not self.output_length:
            return []
        count = (len(self.tokens) - 1) // block_size
        if count > len(self.descriptors[group]):
            self.descriptor(count - 1, block_size, group)
        return self.descriptors[group][:count]


def find_hits(pool: BlockPool, sequence: Sequence) -> Hits:
    """The largest boundary that the pool serves in every group, and the blocks needed there."""
    size, groups = pool.block_size, sequence.groups
    if not pool.prefix_caching:
        return Hits(0, [[] for _ in groups])
    if len(groups) == 1 and groups[0].keeps_prefix:
        blocks = pool.find_prefix(sequence.reusable(size))
        return Hits(len(blocks) * size, [blocks])
    chains = [sequence.reusable(size, group) for group in range(len(groups))]
    limit = len(chains[0])
    found: dict[int, list[int | None]] = {}
    for number in sorted(range(len(groups)), key=lambda each: not groups[each].keeps_prefix):
        if groups[number].keeps_prefix:
            found[number] = list(pool.find_prefix(chains[number][:limit]))
            limit = len(found[number])
        else:
            found[number] = [pool.find(wanted) for wanted in chains[number][:limit]]
    there = [[block is not None for block in found[each]] for each in range(len(groups))]
    tokens = usable_boundary(groups, there, limit * size)
    tables = []
    for number, group in enumerate(groups):
        first = group.first_needed(tokens)
        needed = [block for block in found[number][first : tokens // size] if block is not None]
        _must_be_found(group, tokens, len(needed))
        tables.append([NOTHING] * first + needed)
    return Hits(tokens, tables)


def _must_be_found(group: KvGroup, tokens: int, count: int) -> None:
    """Raise RuntimeError where a boundary was chosen that a group does not serve."""
    if count != len(group.needed(tokens)):
        raise RuntimeError(f"{count} {group.kind} blocks are there for the boundary at {tokens}")


def most_blocks(groups: Many[KvGroup], block_size: int, tokens: int, step_tokens: int) -> int:
    """Most blocks that a request of ``tokens`` holds at a time, in all groups.

    A step computes at most ``step_tokens`` of it; blocks behind a window are released.
    """
    total = 0
    for group in groups:
        blocks = -(-tokens // block_size)
        if not group.keeps_prefix:
            blocks = min(blocks, -(-(group.window + step_tokens) // block_size) + 2)
        total += blocks
    return total


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
    adapter: LoraAdapter | None = None
    """As ``Sequence.adapter``."""

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
        self._release(sequence)
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
            hits = find_hits(self.pool, sequence)
            if not self._has_room_for(sequence, hits):
                break
            if not all(load.ready(sequence, hits) for load in sequence.loads):
                position += 1  # others continue while its blocks are on their way
                continue
            del self._waiting[position]
            self._running[sequence.key] = sequence
            for group, table in enumerate(hits.tables):
                self._reuse(sequence, group, table)
            sequence.tables = hits.tables
            sequence.registered = hits.tokens // self.pool.block_size
            sequence.computed = hits.tokens
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
            count = min(sequence.uncomputed, budget)
            grown = self._grow(sequence, count)
            assert grown, "_has_room_for promised these blocks"
            plan[sequence.key] = count
            budget -= count

    def _reuse(self, sequence: Sequence, group: int, table: list[int]) -> None:
        size = self.pool.block_size
        for index, block in enumerate(table):
            if block == NOTHING:
                continue
            self.pool.reuse(block)
            if sequence.request.retention:
                self.pool.keep(block, sequence.descriptor(index, size, group).facts)

    def _has_room_for(self, sequence: Sequence, hits: Hits) -> bool:
        """Whether all of its tokens fit beside the blocks that running requests still need.

        One block of headroom for each running request and group keeps a newcomer from being
        admitted only to be preempted a few tokens later.
        """
        owed = sum(
            max(0, self._most_blocks(running) - _held(running.tables)) + len(running.tables)
            for running in self._running.values()
        )
        found = [block for table in hits.tables for block in table if block != NOTHING]
        revived = sum(not self.pool.in_flight(block) for block in found)
        needed = max(0, self._most_blocks(sequence) - len(found))
        return needed + revived + owed <= self.pool.available

    def _most_blocks(self, sequence: Sequence) -> int:
        size = self.pool.block_size
        return most_blocks(sequence.groups, size, len(sequence.tokens), self._max_tokens)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Give the sequence the blocks that its next ``count`` tokens need, if there are any.

        Before, it releases what no later token of it reads.
        """
        for group, table in zip(sequence.groups, sequence.tables, strict=True):
            if not group.keeps_prefix:
                self._release_behind(table, group.first_needed(sequence.computed))
        wanted = self._blocks_for(sequence.computed + count)
        missing = [max(0, wanted - len(table)) for table in sequence.tables]
        blocks = self.pool.allocate(sum(missing))
        if blocks is None:
            return False
        for table, number in zip(sequence.tables, missing, strict=True):
            table.extend(blocks[:number])
            del blocks[:number]
        return True

    def _release_behind(self, table: list[int], first: int) -> None:
        index = first - 1
        behind: list[int] = []
        while index >= 0 and table[index] != NOTHING:
            behind.append(table[index])
            table[index] = NOTHING
            index -= 1
        self.pool.release(behind[::-1])

    def _release(self, sequence: Sequence) -> None:
        """Of what is to be reallocated first, windows are first, and states last."""
        order = sorted(
            zip(sequence.groups, sequence.tables, strict=True),
            key=lambda each: (each[0].kind is KvKind.RECURRENT, each[0].keeps_prefix),
        )
        for _, table in order:
            self.pool.release([block for block in table if block != NOTHING])
        sequence.tables = [[] for _ in sequence.groups]

    def _preempt(self, victim: Sequence) -> None:
        del self._running[victim.key]
        self._release(victim)
        victim.computed, victim.registered = 0, 0
        victim.tiers_asked = False
        insort(self._waiting, victim, key=_rank)
        self.preemptions += 1

    def _register_full_blocks(self, sequence: Sequence) -> None:
        size = self.pool.block_size
        full = sequence.computed // size
        for group, table in enumerate(sequence.tables):
            for index in range(sequence.registered, full):
                content = sequence.descriptor(index, size, group)
                table[index] = self.pool.register(table[index], content)
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
            others=tuple(map(tuple, sequence.tables[1:])),
            adapter=sequence.adapter,
        )


def _held(tables: Iterable[Iterable[int]]) -> int:
    return sum(block != NOTHING for table in tables for block in table)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank

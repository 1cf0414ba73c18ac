"""Storage tiers behind the arena: blocks are offloaded to them, and onboarded from them.

Runs on the engine's thread; the tiers' own threads move the bytes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from itertools import islice
from math import ceil

from attrs import define, field

from commutator import BlockKey
from commutator.contract.block import BlockDescriptor, KvEvent
from commutator_engine_kit.kv import FinishedOnboard, GroupChain, KvConnector, OnboardTicket
from commutator_reference.block_pool import BlockPool
from commutator_reference.scheduler import Hits, Sequence, find_hits

_LENT_SHARE = 0.25
"""Blocks of the arena that may be on their way to a tier at a time; others wait."""
_SPEED_FORGETTING = 0.8
_DEMAND_FORGETTING = 0.999
_ASK_AGAIN_S = 0.25
"""Delay until a block that no tier took is offered again."""
_REQUESTS_AHEAD = 8
_CONVERSATIONS = 64
_MOST_FAILURES = 3
"""Loads of all groups that may fail for a request before it is computed."""


@define
class _Onboard:
    sequence: Sequence
    ticket: OnboardTicket
    places: Many[tuple[int, int]]
    """The group, and the number in the prompt, of each block that is loaded."""
    hits: list[int]
    """Blocks of the prompt that the pool has, held during the load."""
    blocks: list[int] = field(factory=list)
    returned: set[int] = field(factory=set)
    good: int | None = None
    """How many of ``blocks`` are verified; set when the load ends."""


class Tiering:
    """Connects the scheduler's block pool with the KV connector."""

    def __init__(self, connector: KvConnector, pool: BlockPool) -> None:
        self._connector = connector
        self._pool = pool
        self._plans: dict[int, Future[OnboardTicket]] = {}
        """Keys of requests that wait for the answer of a shared tier."""
        self._loads: dict[int, _Onboard] = {}
        self._loading_blocks: dict[int, int] = {}
        """Device block to the key of the request that it is loaded for."""
        self._offers: dict[int, BlockDescriptor] = {}
        """Computed or used blocks that are not offloaded or counted yet."""
        self._evictions = EvictionOffloader(connector, pool)
        self._lent = 0
        self._tokens_per_s: float | None = None
        self._has_groups = len(connector.groups) > 1 or not connector.groups[0].keeps_prefix
        self._failures: dict[int, int] = {}
        """Of requests for which a load of all groups failed: how often."""
        self.prefetcher = QueuePrefetcher(connector, pool)
        pool.has_tiers = True
        pool.on_registered = self._registered
        if connector.counts_uses:
            pool.on_reused = self._used

    def ready(self, sequence: Sequence, hits: Hits) -> bool:
        """Whether the request can be admitted; begins to load blocks where that pays."""
        if sequence.tiers_asked or not self._pool.prefix_caching:
            return True
        if (running := self._loads.get(sequence.key)) is not None:
            return running.good is not None
        size = self._pool.block_size
        wanted = sequence.reusable(size)
        if len(wanted) * size <= hits.tokens:
            return True
        plan = self._plans.pop(sequence.key, None)
        if plan is None:
            plan = self._plan(sequence, hits, wanted)
        if not plan.done():
            self._plans[sequence.key] = plan
            return False
        return self._begin(sequence, hits, plan.result())

    def _begin(self, sequence: Sequence, hits: Hits, ticket: OnboardTicket) -> bool:
        """Load what the ticket has; as ``ready``."""
        places = self._places(ticket, hits)
        held = None if places is None else self._found(sequence, ticket, hits, places)
        if places is None or held is None:  # blocks that the plan counted on were evicted
            self._connector.loads.cancel(ticket)
            return self.ready(sequence, hits)
        sequence.tiers_asked = True
        if not places:
            self._connector.loads.cancel(ticket)
            return True
        for block in held:
            self._pool.acquire(block)
        blocks = self._pool.allocate(len(places))
        if blocks is None:
            self._pool.release(held)
            self._connector.loads.cancel(ticket)
            return True
        self._loads[sequence.key] = _Onboard(sequence, ticket, places, held, blocks)
        self._loading_blocks.update(dict.fromkeys(blocks, sequence.key))
        if self._has_groups:
            by_group: list[list[int]] = [[] for _ in sequence.groups]
            for (group, _), block in zip(places, blocks, strict=True):
                by_group[group].append(block)
            self._connector.loads.onboard_groups(ticket, by_group)
        else:
            self._connector.loads.onboard(ticket, blocks, skip=ticket.blocks - len(places))
        sequence.tiers_asked = False
        return False

    def _plan(
        self, sequence: Sequence, hits: Hits, wanted: Many[BlockDescriptor]
    ) -> Future[OnboardTicket]:
        if self._has_groups:
            return self._connector.lookups.plan_groups(
                group_chains(self._pool, sequence),
                len(wanted) * self._pool.block_size,
                tokens_per_s=self._tokens_per_s,
                request_id=str(sequence.key),
            )
        return self._connector.lookups.plan(
            [each.key for each in wanted],
            first=len(hits.blocks),
            tokens_per_s=self._tokens_per_s,
            request_id=str(sequence.key),
        )

    def _places(self, ticket: OnboardTicket, hits: Hits) -> list[tuple[int, int]] | None:
        """The blocks to load; None where the pool has less than when that was planned."""
        if self._has_groups:
            return list(ticket.places) if ticket.boundary > hits.tokens else []
        skip = len(hits.blocks) - ticket.first  # other requests may have computed or evicted some
        last = ticket.first + ticket.blocks
        return None if skip < 0 else [(0, each) for each in range(ticket.first + skip, last)]

    def _found(
        self, sequence: Sequence, ticket: OnboardTicket, hits: Hits, places: Many[tuple[int, int]]
    ) -> list[int] | None:
        """The blocks of the pool that are needed beside the loaded ones; None if one is gone."""
        if not self._has_groups:
            return list(hits.blocks)
        size, loaded = self._pool.block_size, set(places)
        found: list[int] = []
        for number, group in enumerate(sequence.groups if places else ()):
            for index in group.needed(ticket.boundary):
                if (number, index) not in loaded:
                    block = self._pool.find(sequence.descriptor(index, size, number))
                    if block is None:
                        return None
                    found.append(block)
        return list(dict.fromkeys(found))

    def drop(self, key: int) -> None:
        """The request ended; its blocks are released when the load ends."""
        self._connector.lookups.forget(str(key))
        if (plan := self._plans.pop(key, None)) is not None and not plan.cancel():
            self._connector.loads.cancel(plan.result())
        if (load := self._loads.get(key)) is not None:
            self._connector.loads.cancel(load.ticket)
        self.prefetcher.gone(key)
        self._failures.pop(key, None)

    def look_ahead(self, queue: Many[Sequence], *, idle: bool) -> None:
        """Prefetch from slow tiers what will be needed soon, once a step is planned.

        ``queue`` are the requests that were not admitted, the next one first; ``idle`` says
        whether no request is running.
        """
        if queue:
            self.prefetcher.waiting(
                sequence
                for sequence in queue
                if sequence.key not in self._loads and not sequence.tiers_asked
            )
        elif idle:
            self.prefetcher.idle()

    @property
    def storing(self) -> bool:
        """Whether blocks are on their way to a tier, or wait for it."""
        return bool(self._lent or self._offers)

    def update(self) -> list[KvEvent]:
        """Take onboarded and released blocks, and offload new ones; once a step.

        Returns the tiers' KV events.
        """
        polled = self._connector.poll()
        for block in polled.released:
            if (key := self._loading_blocks.get(block)) is not None:
                self._loads[key].returned.add(block)
            else:
                self._pool.take_back(block)
                self._evictions.came_back(block)
                self._lent -= 1
        for finished in polled.onboards:
            self._finish(finished)
        for key in [key for key, load in self._loads.items() if load.good is not None]:
            self._give_back(key)
        self._offer()
        if self._connector.takes_evicted:
            self._lend(self._evictions.take(self._room()), self._connector.stores.offload_evicted)
        return polled.events

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed ``tokens`` prompt tokens in ``seconds``."""
        speed = tokens / seconds
        old = self._tokens_per_s
        keep = _SPEED_FORGETTING
        self._tokens_per_s = speed if old is None else keep * old + (1 - keep) * speed

    def _finish(self, finished: FinishedOnboard) -> None:
        load = self._loads[int(finished.ticket.request_id)]
        load.good = finished.blocks
        block_size = self._pool.block_size
        for (group, index), block in zip(load.places, load.blocks[: finished.blocks], strict=False):
            content = load.sequence.descriptor(index, block_size, group)
            if (twin := self._pool.adopt(block, content)) != block:
                # Held as long as the blocks after it, it is not reallocated before them.
                load.hits.append(twin)
                continue
            if content.facts.is_plain:
                self._evictions.is_kept(content.key)
            if self._connector.counts_uses:
                # The load was counted as a use; the admission of the request is the same use.
                self._offers.pop(block, None)
        load.sequence.tiers_asked = not self._tries_again(load, finished.blocks)

    def _tries_again(self, load: _Onboard, good: int) -> bool:
        """Whether to plan again: without the damaged block, an earlier boundary may be served."""
        if good or not self._has_groups:
            return False
        key = load.sequence.key
        self._failures[key] = self._failures.get(key, 0) + 1
        return self._failures[key] < _MOST_FAILURES

    def _give_back(self, key: int) -> None:
        """Release loaded blocks; the prefix cache keeps registered ones."""
        load = self._loads[key]
        for block in reversed(load.blocks):
            if block in load.returned:
                self._pool.release([block])
                del self._loading_blocks[block]
        load.blocks = [block for block in load.blocks if block not in load.returned]
        load.returned.clear()
        self._pool.release(load.hits)
        load.hits = []
        if not load.blocks:
            del self._loads[key]

    def _registered(self, block: int, content: BlockDescriptor) -> None:
        self._evictions.is_new(content.key)
        if self._connector.takes_computed or self._connector.counts_uses:
            self._used(block, content)

    def _used(self, block: int, content: BlockDescriptor) -> None:
        self._offers.pop(block, None)
        self._offers[block] = content

    def _offer(self) -> None:
        if not self._connector.takes_computed:
            # Tiers that store on eviction may decide by the number of uses.
            if self._offers:
                self._connector.stores.used([content.key for content in self._offers.values()])
                self._offers.clear()
            return
        room = self._room()
        chosen: list[int] = []
        while self._offers and len(chosen) < room:
            block = next(iter(self._offers))
            if self._pool.find(self._offers.pop(block)) == block:  # it may have been dropped
                chosen.append(block)
        self._lend(chosen, self._connector.stores.offload)

    def _room(self) -> int:
        """How many more blocks may be on their way to a tier."""
        return max(1, int(self._pool.num_blocks * _LENT_SHARE)) - self._lent

    def _lend(
        self, blocks: Many[int], offload: Callable[[Many[BlockDescriptor], Many[int]], object]
    ) -> None:
        if blocks:
            for block in blocks:
                self._pool.lend(block)
            self._lent += len(blocks)
            offload([self._pool.descriptor(block) for block in blocks], blocks)


def group_chains(pool: BlockPool, sequence: Sequence) -> list[GroupChain]:
    """A prompt's blocks in each group, and which of them the pool has."""
    chains = []
    for number, group in enumerate(sequence.groups):
        chain = sequence.reusable(pool.block_size, number)
        here = {index for index, wanted in enumerate(chain) if pool.find(wanted) is not None}
        chains.append(GroupChain(group=group, keys=[each.key for each in chain], on_device=here))
    return chains


class EvictionOffloader:
    """Looks far enough ahead that the blocks a step reallocates were copied in earlier steps.

    Blocks on their way to a tier are not reallocated: the next ones are, so these must have been
    copied already. The distance depends on how many blocks are reallocated during one copy.
    """

    def __init__(
        self, connector: KvConnector, pool: BlockPool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connector = connector
        self._pool = pool
        self._clock = clock
        self._asked: OrderedDict[BlockKey, float] = OrderedDict()
        """Keys that were offered or came from a tier, and when to check that a tier has them."""
        self._begun: dict[int, int] = {}
        """Blocks being copied, and how many blocks had been allocated when the copy began."""
        self._taken = pool.taken
        self._demand = 0.0
        """Most blocks allocated recently in one step, or during one copy."""

    def is_kept(self, key: BlockKey) -> None:
        """The block came from a tier."""
        self._asked[key] = self._clock() + _ASK_AGAIN_S

    def is_new(self, key: BlockKey) -> None:
        """The block was computed, or its retention hints changed: offer it to the tier."""
        self._asked.pop(key, None)

    def came_back(self, block: int) -> None:
        """A copy of the block ended."""
        if (begun := self._begun.pop(block, None)) is not None:
            self._demand = max(self._demand, self._pool.taken - begun)

    def take(self, room: int) -> list[int]:
        """Once a step: up to ``room`` blocks to offload now, the beginnings of chains first."""
        self._measure()
        ahead = 2 * ceil(self._demand) - self._pool.free
        room = min(room, self._spare())
        if ahead <= 0 or room <= 0:
            return []
        chosen = self._wanted(self._pool.oldest_cached(ahead))[:room]
        for offer, block in chosen:
            self._asked[offer.key] = self._clock() + _ASK_AGAIN_S
            self._begun[block] = self._pool.taken
        while len(self._asked) > 4 * self._pool.num_blocks:
            self._asked.popitem(last=False)
        return [block for _, block in reversed(chosen)]

    def _measure(self) -> None:
        taken, self._taken = self._pool.taken - self._taken, self._pool.taken
        if taken:
            self._demand = max(taken, self._demand * _DEMAND_FORGETTING)

    def _spare(self) -> int:
        """How many blocks can be lent without making a request of the next step wait for a copy.

        At least half of them, even if a step takes nearly all: otherwise none would be copied.
        """
        available = self._pool.available
        return max(available - ceil(self._demand), available // 2)

    def _wanted(self, oldest: Many[int]) -> list[tuple[BlockDescriptor, int]]:
        """Blocks not offered yet, or that no tier took before and one would take now."""
        now_s = self._clock()
        offers = [(self._pool.descriptor(block), block) for block in oldest]
        due = [each for each in offers if self._asked.get(each[0].key, now_s) <= now_s]
        again = [offer for offer, _ in due if offer.key in self._asked]
        missed = self._connector.stores.admissible(again) if again else set()
        settled = {offer.key for offer in again} - missed
        self._asked.update(dict.fromkeys(settled, now_s + _ASK_AGAIN_S))
        return [(offer, block) for offer, block in due if offer.key not in settled]


class QueuePrefetcher:
    """Prefetches for waiting requests, and for conversations that may continue."""

    def __init__(self, connector: KvConnector, pool: BlockPool) -> None:
        self._connector = connector
        self._pool = pool
        self._seen: set[int] = set()
        """Requests that were prefetched."""
        self._ended: OrderedDict[BlockKey, Sequence] = OrderedDict()
        """Recently answered conversations, by their last block."""
        self._conversation: Future[None] | None = None
        """The prefetch of an answered conversation, until its copies have begun."""

    def waiting(self, queue: Iterable[Sequence]) -> None:
        """Prefetch for requests that are not admitted, the next one first."""
        for sequence in islice(queue, _REQUESTS_AHEAD):
            if sequence.key not in self._seen:
                self._seen.add(sequence.key)
                self._prefetch(sequence, str(sequence.key))

    def gone(self, key: int) -> None:
        """The request was served or aborted."""
        self._seen.discard(key)

    def ended(self, sequence: Sequence) -> None:
        """An answer is complete; the conversation may continue."""
        if chain := sequence.reusable(self._pool.block_size):
            last = chain[-1].key
            self._ended[last] = sequence
            self._ended.move_to_end(last)
            if len(self._ended) > _CONVERSATIONS:
                self._ended.popitem(last=False)

    def idle(self) -> None:
        """Nothing runs or waits: prefetch the latest conversation that was not yet prefetched."""
        if self._conversation is not None and not self._conversation.done():
            return
        self._conversation = None
        if self._ended and self._connector.idle:
            self._conversation = self._prefetch(self._ended.popitem()[1])

    def _prefetch(self, sequence: Sequence, request_id: str | None = None) -> Future[None] | None:
        """Prefetch blocks that the engine's own memory lacks; None when it lacks none."""
        size = self._pool.block_size
        chain = sequence.reusable(size)
        here = find_hits(self._pool, sequence).tokens
        if here == len(chain) * size:
            return None
        lookups = self._connector.lookups
        if len(sequence.groups) > 1:
            chains = group_chains(self._pool, sequence)
            return lookups.prefetch_groups(chains, len(chain) * size, request_id=request_id)
        keys = [each.key for each in chain]
        return lookups.prefetch(keys, first=here // size, request_id=request_id)

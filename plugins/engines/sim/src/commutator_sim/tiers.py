"""Memory behind the device, run by the KV manager: what is kept, what goes, what is worth loading.

Stores take no time (they run beside the steps), so the manager's are carried out at once. A load
takes that of its tier's link, one load after the other.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import count

from attrs import define, evolve, frozen

from commutator.engine import eviction_policy
from commutator.kv import (
    Action,
    Announce,
    BlockKey,
    KvManager,
    LoadResult,
    Offer,
    PrefillSpeed,
    StoreBlocks,
    Stored,
    TierSpec,
    block_facts,
    is_stronger,
)
from commutator_sim.events import DEVICE, Offloaded, Removed
from commutator_sim.parameters import SimParameters, TierParameters
from commutator_sim.request import SimRequest

__all__ = ["Load", "OffloadTiers"]

_KEY_BYTES = 16
TierEvent = Offloaded | Removed


@frozen
class Load:
    """So many of the blocks asked for come from the tiers, and are all there at ``ready_ns``."""

    blocks: int = 0
    ready_ns: int = 0


@define(eq=False)
class _Link:
    parameters: TierParameters
    free_ns: int = 0

    def load(self, blocks: int, now_ns: int) -> int:
        """When blocks that are asked for now are there."""
        self.free_ns = max(self.free_ns, now_ns) + blocks * self.parameters.load_block_ns
        return self.free_ns + self.parameters.latency_ns

    def seconds(self, blocks: int) -> float:
        """What that takes when nothing goes before it."""
        return (blocks * self.parameters.load_block_ns + self.parameters.latency_ns) / 1e9


class OffloadTiers:
    """The tiers, fastest first. Without any, nothing is kept and every method is cheap."""

    def __init__(self, parameters: SimParameters) -> None:
        """Raises ConfigError when no installed plugin offers an eviction policy."""
        tiers = parameters.tiers
        self.manager = KvManager([_spec(tier) for tier in tiers], most_waiting=sys.maxsize)
        self._links = [_Link(tier) for tier in tiers]
        self._block_size = parameters.block_size
        self._prefill = PrefillSpeed(
            tokens_per_s=parameters.prefill_tokens_per_s, block_size=parameters.block_size
        )
        self._takes_computed = any(tier.write == "through" for tier in tiers)
        self._takes_evicted = bool(tiers) and tiers[0].write == "on_evict"
        self._counts_uses = any(rule.counts_uses for tier in tiers for rule in tier.admission)
        self._offers: dict[int, Offer] = {}
        """Of every block that is on the device and has a key."""
        self._load_ids = count()
        self._now_s = 0.0

    def on_device(
        self, request: SimRequest, first: int, end: int, now_ns: int
    ) -> Sequence[TierEvent]:
        """These blocks of a request are computed or loaded, or it uses what was there."""
        if not self._links or first == end:
            return ()
        known, keys = self._offers, request.block_keys
        if request.retention:
            offers = [self._offer(request, index) for index in range(first, end)]
        else:
            offers = [known.get(keys[i]) or self._offer(request, i) for i in range(first, end)]
        if not (self._takes_computed or self._counts_uses):
            return ()
        return self._carry_out(self.manager.offer(offers, self._passed(now_ns)), now_ns)

    def load(self, keys: Sequence[int], now_ns: int) -> Load:
        """Begin to bring to the device what is worth it of these consecutive blocks."""
        if not self._links or not keys:
            return Load()
        names = [_name(key) for key in keys]
        now_s, load_id = self._passed(now_ns), str(next(self._load_ids))
        plan = self.manager.begin_load(load_id, names, 0, now_s, prefill=self._prefill)
        if not plan.blocks:
            return Load()
        by_tier = Counter(tier for _, tier in plan.blocks)
        ready_ns = max(self._links[tier].load(n, now_ns) for tier, n in by_tier.items())
        # The tiers are read at once, and need not hold the blocks until they have arrived.
        loaded = {key: LoadResult.LOADED for key, _ in plan.blocks}
        seconds = {tier: self._links[tier].seconds(n) for tier, n in by_tier.items()}
        self.manager.finish_load(load_id, loaded, now_s, seconds=seconds)
        return Load(len(plan.blocks), ready_ns)

    def evict(self, keys: Sequence[int], now_ns: int) -> list[TierEvent]:
        """``keys`` leave the device, least recently used first; what that changes everywhere.

        Copies are told of before what they were copied from is gone, and no tier ever overflows.
        """
        events: list[TierEvent] = []
        if self._links:
            # The most recent and the beginnings of chains first, as the manager wants them.
            offers = [self._offers.pop(key) for key in reversed(keys)]
            if self._takes_evicted:
                actions = self.manager.device_evicting(offers, self._passed(now_ns))
                events += self._carry_out(actions, now_ns)
        events.append(Removed(now_ns, DEVICE, tuple(keys)))
        return events

    def clear(self, idle: Sequence[int], now_ns: int) -> list[TierEvent]:
        """Forget every block in the tiers; those in ``idle`` leave the device, too."""
        events: list[TierEvent] = [Removed(now_ns, DEVICE, tuple(idle))] if idle else []
        if self._links:
            for key in idle:
                del self._offers[key]
            events += self._carry_out(self.manager.clear(self._passed(now_ns)), now_ns)
        return events

    def _offer(self, request: SimRequest, index: int) -> Offer:
        """Of a block on the device; of several that ask to keep it, the strongest holds."""
        offers, keys = self._offers, request.block_keys
        facts = block_facts(
            index, self._block_size, request.prompt_tokens, request.tenant, request.retention
        )
        offer = offers.get(keys[index])
        if offer is None:
            parent = offers[keys[index - 1]].key if index else None
            offer = Offer(key=_name(keys[index]), parent=parent, token_ids=(), facts=facts)
        elif is_stronger(facts, offer.facts):
            offer = evolve(offer, facts=facts)
        offers[keys[index]] = offer
        return offer

    def _carry_out(self, actions: Iterable[Action], now_ns: int) -> list[TierEvent]:
        """In the order of the manager's decisions, so that the events tell of its states."""
        events: list[TierEvent] = []
        left = deque(actions)
        while left:
            match left.popleft():
                case Announce(what=what, medium=tier, blocks=blocks):
                    kind = Offloaded if what == "stored" else Removed
                    events.append(kind(now_ns, tier, tuple(_number(one.key) for one in blocks)))
                case StoreBlocks() as store:
                    written = [Stored(key=k, slot=0, size_bytes=1, checksum=0) for k in store.keys]
                    left += self.manager.finish_store(store.move_id, written, {}, self._now_s)
        return events

    def _passed(self, now_ns: int) -> float:
        """The time in seconds. The manager's must not run backwards; a step's begin may."""
        self._now_s = max(self._now_s, now_ns / 1e9)
        return self._now_s


def _spec(tier: TierParameters) -> TierSpec:
    return TierSpec(
        name=tier.name,
        medium=tier.name,
        capacity_blocks=tier.capacity_blocks,
        eviction=eviction_policy(tier.eviction, tier.capacity_blocks),
        admission=tier.admission,
        write=tier.write,
        prefetch=False,
        tenant_share=tier.tenant_share,
        tenant_shares=tier.tenant_shares,
    )


def _name(key: int) -> BlockKey:
    return key.to_bytes(_KEY_BYTES, "little", signed=True)


def _number(name: BlockKey) -> int:
    return int.from_bytes(name, "little", signed=True)

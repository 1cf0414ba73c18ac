"""Tiers behind the device: the block manager decides what is stored, evicted and onboarded.

Stores run beside the steps and take no time, so they are carried out at once. Loads take the time
of their tier's link, one after the other.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import count

from attrs import define, evolve, frozen

from commutator import BlockKey, StoredBlock
from commutator.contract.block import BlockDescriptor, is_stronger, retention_hints
from commutator_engine_kit.kv import (
    Action,
    Announce,
    BlockManager,
    LoadResult,
    StoreBlocks,
    TierSpec,
    eviction_factory,
)
from commutator_sim.config import SimConfig, SimTier
from commutator_sim.events import DEVICE, Offloaded, Removed
from commutator_sim.request import SimRequest

_KEY_BYTES = 16
TierEvent = Offloaded | Removed


@frozen
class Load:
    """The first ``blocks`` of the requested blocks are loaded, the last one at ``ready_ns``."""

    blocks: int = 0
    ready_ns: int = 0


@define(eq=False)
class _Link:
    block_ns: int
    latency_ns: int
    free_ns: int = 0

    def load(self, blocks: int, now_ns: int) -> int:
        """When blocks that are requested now have arrived."""
        self.free_ns = max(self.free_ns, now_ns) + blocks * self.block_ns
        return self.free_ns + self.latency_ns

    def seconds(self, blocks: int) -> float:
        """Duration of a load that waits for no other."""
        return (blocks * self.block_ns + self.latency_ns) / 1e9


class OffloadTiers:
    """The tiers, fastest first. Without tiers every method is cheap."""

    def __init__(self, parameters: SimConfig) -> None:
        """Raises ConfigError when no installed plugin offers an eviction policy."""
        tiers = parameters.tiers
        self.manager = BlockManager([_spec(tier) for tier in tiers], most_waiting=sys.maxsize)
        self._links = [
            _Link(parameters.block_ns(tier.bandwidth_bytes_per_s), round(tier.latency_s * 1e9))
            for tier in tiers
        ]
        self._block_size = parameters.block_size
        self._compute_s = parameters.block_size / parameters.prefill_tokens_per_s
        self._takes_computed = any(tier.write == "through" for tier in tiers)
        self._takes_evicted = bool(tiers) and tiers[0].write == "on_evict"
        self._counts_uses = any(tier.admission.min_hits > 1 for tier in tiers)
        self._offers: dict[int, BlockDescriptor] = {}
        """Descriptors of the blocks on the device that have a key."""
        self._load_ids = count()
        self._now_s = 0.0

    def on_device(
        self, request: SimRequest, first: int, end: int, now_ns: int
    ) -> Sequence[TierEvent]:
        """Blocks ``first`` to ``end`` of a request were computed, loaded or found on the device."""
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
        """Begin to load those of these consecutive blocks that load faster than they compute."""
        if not self._links or not keys:
            return Load()
        names = [_name(key) for key in keys]
        now_s, load_id = self._passed(now_ns), str(next(self._load_ids))
        plan = self.manager.begin_onboard(load_id, names, 0, now_s, compute_s=self._compute_s)
        if not plan.blocks:
            return Load()
        by_tier = Counter(tier for _, tier in plan.blocks)
        ready_ns = max(self._links[tier].load(n, now_ns) for tier, n in by_tier.items())
        # A load reads the tiers at once: they need not pin the blocks until these have arrived.
        loaded = {key: LoadResult.LOADED for key, _ in plan.blocks}
        seconds = {tier: self._links[tier].seconds(n) for tier, n in by_tier.items()}
        self.manager.finish_onboard(load_id, loaded, now_s, seconds=seconds)
        return Load(len(plan.blocks), ready_ns)

    def evict(self, keys: Sequence[int], now_ns: int) -> list[TierEvent]:
        """The device evicts ``keys``, least recently used first; returns the resulting events.

        A block's copy in a tier is announced before the block is removed from the device.
        """
        events: list[TierEvent] = []
        if self._links:
            # The manager expects the most recently used blocks and the beginnings of chains first.
            offers = [self._offers.pop(key) for key in reversed(keys)]
            if self._takes_evicted:
                actions = self.manager.offload_evicted(offers, self._passed(now_ns))
                events += self._carry_out(actions, now_ns)
        events.append(Removed(now_ns, DEVICE, tuple(keys)))
        return events

    def clear(self, idle: Sequence[int], now_ns: int) -> list[TierEvent]:
        """Forget every block in the tiers, and the device's blocks ``idle``."""
        events: list[TierEvent] = [Removed(now_ns, DEVICE, tuple(idle))] if idle else []
        if self._links:
            for key in idle:
                del self._offers[key]
            events += self._carry_out(self.manager.clear(self._passed(now_ns)), now_ns)
        return events

    def _offer(self, request: SimRequest, index: int) -> BlockDescriptor:
        """Descriptor of a block on the device, with the strongest retention hints asked for."""
        offers, keys = self._offers, request.block_keys
        facts = retention_hints(
            index, self._block_size, request.prompt_tokens, request.tenant, request.retention
        )
        offer = offers.get(keys[index])
        if offer is None:
            parent = offers[keys[index - 1]].key if index else None
            offer = BlockDescriptor(
                key=_name(keys[index]), parent=parent, token_ids=(), facts=facts
            )
        elif is_stronger(facts, offer.facts):
            offer = evolve(offer, facts=facts)
        offers[keys[index]] = offer
        return offer

    def _carry_out(self, actions: Iterable[Action], now_ns: int) -> list[TierEvent]:
        """Carry out the manager's actions; returns the events in the order of its decisions."""
        events: list[TierEvent] = []
        left = deque(actions)
        while left:
            match left.popleft():
                case Announce(what=what, medium=tier, blocks=blocks):
                    kind = Offloaded if what == "stored" else Removed
                    events.append(kind(now_ns, tier, tuple(_number(one.key) for one in blocks)))
                case StoreBlocks() as store:
                    written = [
                        StoredBlock(key=k, slot=0, size_bytes=1, checksum=0) for k in store.keys
                    ]
                    left += self.manager.finish_store(store.move_id, written, {}, self._now_s)
        return events

    def _passed(self, now_ns: int) -> float:
        """The time in seconds, which never runs backwards for the manager; a step's begin may."""
        self._now_s = max(self._now_s, now_ns / 1e9)
        return self._now_s


def _spec(tier: SimTier) -> TierSpec:
    return TierSpec(
        name=tier.kind,
        medium=tier.kind,
        capacity_blocks=tier.capacity_blocks,
        eviction=eviction_factory(tier.eviction),
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

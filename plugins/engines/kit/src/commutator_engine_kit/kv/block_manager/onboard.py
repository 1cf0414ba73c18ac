"""Onboarding: which blocks are worth loading into the device, and what finished loads show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from attrs import define, frozen

from commutator.contract.block import BlockKey
from commutator_engine_kit.kv.block_manager.actions import Action, LoadResult
from commutator_engine_kit.kv.block_manager.block_pool import LoadCost, TierBlockPool, count
from commutator_engine_kit.kv.block_manager.index import BlockIndex, UseCounts
from commutator_engine_kit.kv.block_manager.offload import OffloadScheduler

__all__ = [
    "BreakEven",
    "OnboardPlan",
    "OnboardScheduler",
    "best_prefix",
    "prefetch",
]

PROBE_BLOCKS = 8
"""Number of blocks loaded to measure a slow tier again."""


@frozen(kw_only=True)
class OnboardPlan:
    """The blocks to load before a prompt is computed."""

    load_id: str
    blocks: tuple[tuple[BlockKey, int], ...]
    """Each block and its tier; empty when no block is worth loading."""
    reason: str
    """Why no more blocks are loaded, or "everything"."""


@define
class _Running:
    blocks: tuple[tuple[BlockKey, int], ...]
    begun_s: float


class OnboardScheduler:
    """Pins the blocks of running loads, and measures the tiers by finished ones."""

    def __init__(self, index: BlockIndex, uses: UseCounts | None, probe_interval_s: float) -> None:
        self.index = index
        self.running: dict[str, _Running] = {}
        self._uses = uses
        self._probe_interval_s = probe_interval_s
        self._probed_s: dict[int, float] = {}

    def begin(
        self,
        load_id: str,
        keys: Sequence[BlockKey],
        first: int,
        now_s: float,
        compute_s: float | None,
    ) -> OnboardPlan:
        """Choose the blocks to load, and pin them. A plan without blocks needs no ``finish``."""
        if load_id in self.running:
            raise ValueError(f"the load {load_id} is running: finish it first")
        tiers = self.index.match(keys, first)
        missing = self._miss_reason(keys, first + len(tiers))
        if not tiers:
            return OnboardPlan(load_id=load_id, blocks=(), reason=missing)
        costs = {tier: self.index.pools[tier].speed.cost for tier in set(tiers)}
        gate = best_prefix(tiers, costs, compute_s)
        blocks, reason = gate.blocks, missing
        if blocks < len(tiers):
            reason = _slower(gate, len(tiers))
            if (probe := self._probe(tiers, blocks, now_s)) is not None:
                blocks, tier = probe
                reason = f"to measure {self.index.pools[tier].spec.name} again; {reason}"
            for tier, left in Counter(tiers[blocks:]).items():
                counts = self.index.pools[tier].counts
                count(counts.not_loaded, "slower than recompute", left)
        planned = tuple(zip(keys[first : first + blocks], tiers[:blocks], strict=True))
        for key, tier in planned:
            self.index.pools[tier].pin(key)
        if planned:
            self.running[load_id] = _Running(planned, now_s)
        return OnboardPlan(load_id=load_id, blocks=planned, reason=reason)

    def finish(
        self,
        load_id: str,
        results: Mapping[BlockKey, LoadResult],
        now_s: float,
        seconds: Mapping[int, float] | None,
    ) -> list[Action]:
        """Unpin the blocks, count their results, and remove missing and corrupt ones."""
        load = self.running.pop(load_id, None)
        if load is None:
            raise ValueError(f"there is no load {load_id}: it was finished, or had no blocks")
        by_tier: dict[int, list[BlockKey]] = {}
        # The last block of a chain first, so that it is evicted first.
        for key, tier in reversed(load.blocks):
            by_tier.setdefault(tier, []).append(key)
        if seconds is None:
            alone = len(by_tier) == 1
            seconds = dict.fromkeys(by_tier, now_s - load.begun_s) if alone else {}
        actions: list[Action] = []
        for tier, keys in by_tier.items():
            pool = self.index.pools[tier]
            outcomes = [results.get(key) for key in keys]
            self._learn(pool, keys, outcomes, now_s)
            if tier in seconds and set(outcomes) == {LoadResult.LOADED}:
                pool.speed.measured(len(keys), seconds[tier], now_s)
            actions += self.index.unpin(pool, keys)
            for bad in (LoadResult.CORRUPT, LoadResult.MISSING):
                those = [key for key, result in zip(keys, outcomes, strict=True) if result is bad]
                actions += self.index.unpublish(pool, those, bad.value)
        return actions

    def _learn(
        self,
        pool: TierBlockPool,
        keys: Sequence[BlockKey],
        outcomes: Sequence[LoadResult | None],
        now_s: float,
    ) -> None:
        for key, result in zip(keys, outcomes, strict=True):
            count(pool.counts.loads, result.value if result is not None else "not run")
            if result is LoadResult.LOADED:
                if key in pool.prefetched:
                    pool.prefetched.remove(key)
                    count(pool.counts.prefetched, "used")
                if self._uses is not None:
                    self._uses.used(key)
                if self.index.is_published(pool, key):
                    self.index.nodes[key].loaded = True
                    pool.touched(key, now_s)

    def _probe(self, tiers: Sequence[int], chosen: int, now_s: float) -> tuple[int, int] | None:
        """The number of blocks to load in order to measure a slow tier again, and that tier."""
        for position in range(chosen, len(tiers)):
            tier = tiers[position]
            measured_s = self.index.pools[tier].speed.measured_s
            last_s = max(
                self._probed_s.get(tier, float("-inf")),
                float("-inf") if measured_s is None else measured_s,
            )
            if now_s - last_s < self._probe_interval_s:
                continue
            self._probed_s[tier] = now_s
            return min(len(tiers), position + PROBE_BLOCKS), tier
        return None

    def _miss_reason(self, keys: Sequence[BlockKey], position: int) -> str:
        if position >= len(keys):
            return "everything"
        node = self.index.nodes.get(keys[position])
        if node is None:
            return "nothing there"
        if node.published:
            lowest = (node.published & -node.published).bit_length() - 1
            pool = self.index.pools[lowest]
            count(pool.counts.not_loaded, "tier is down")
            return f"{pool.spec.name} is down"
        return "being stored" if node.staged else "being evicted"


def _slower(gate: BreakEven, found: int) -> str:
    prefill_s = gate.prefill_s or 0.0
    text = f"slower than recompute: {gate.load_s * 1e3:.1f} ms against {prefill_s * 1e3:.1f} ms"
    return f"{text} for all {found} blocks" if gate.blocks else text


@frozen(kw_only=True)
class BreakEven:
    """How many of the blocks found are worth loading."""

    blocks: int
    load_s: float
    """Predicted seconds to load all blocks found."""
    prefill_s: float | None
    """Predicted seconds to compute them; None while unknown."""


def best_prefix(
    tiers: Sequence[int], costs: Mapping[int, LoadCost | None], compute_s: float | None
) -> BreakEven:
    """The longest prefix for which loading it and computing the rest takes the least time.

    ``compute_s`` is the time to compute a block; None while unknown: then everything is loaded.
    ``tiers`` has the tier of each block. Tiers load in parallel, each in one batch. A tier of
    unknown cost counts as free, so that its loads get measured.
    """
    counts: dict[int, int] = {}
    seconds: dict[int, float] = {}
    prefill_s = None if compute_s is None else len(tiers) * compute_s
    best, load_s = 0, 0.0
    least = float("inf") if prefill_s is None else prefill_s
    for number, tier in enumerate(tiers, start=1):
        counts[tier] = counts.get(tier, 0) + 1
        cost = costs.get(tier)
        seconds[tier] = cost.of(counts[tier]) if cost is not None else 0.0
        load_s = max(load_s, seconds[tier])
        total = load_s + (len(tiers) - number) * (compute_s or 0.0)
        if compute_s is None or total <= least:
            best, least = number, total
    return BreakEven(blocks=best, load_s=load_s, prefill_s=prefill_s)


_MOST_SHARE = 0.25
"""Largest part of a tier's capacity that may be on its way to it, or wait for room."""


def prefetch(
    index: BlockIndex, stores: OffloadScheduler, keys: Sequence[BlockKey], first: int, now_s: float
) -> list[Action]:
    """Copy a chain's blocks from slower tiers to the fastest writable tier.

    The sources keep their copies. No block of the chain is evicted for another.
    """
    target = _target(index)
    if target is None:
        return []
    actions: list[Action] = []
    spared = set(keys)
    room = int(_MOST_SHARE * target.capacity) - target.staged - len(target.waiting)
    tiers = index.match(keys, first)
    for key, tier in zip(keys[first : first + len(tiers)], tiers, strict=True):
        if room <= 0:
            break
        source = index.pools[tier]
        if tier <= target.number or key in source.moving_down:
            continue
        if stores.enqueue(target, index.nodes[key].offer, tier, now_s, actions, spared):
            source.pin(key)
            room -= 1
    stores.settle(now_s, actions, spared)
    return actions


def _target(index: BlockIndex) -> TierBlockPool | None:
    written = (pool for pool in index.pools if pool.spec.write != "never")
    fastest = next((pool for pool in written if pool.up), None)
    return fastest if fastest is not None and fastest.spec.prefetch else None

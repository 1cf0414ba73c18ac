"""Onboarding: which blocks are worth loading into the device, and what finished loads show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from itertools import accumulate

from attrs import define, frozen

from commutator.contract.block import BlockKey
from commutator_engine_kit.kv.block_manager.actions import Action, LoadResult
from commutator_engine_kit.kv.block_manager.block_pool import LoadCost, TierBlockPool, count
from commutator_engine_kit.kv.block_manager.index import BlockIndex, UseCounts
from commutator_engine_kit.kv.block_manager.offload import OffloadScheduler
from commutator_engine_kit.kv.groups import (
    KvGroup,
    alignment,
    shared_boundary,
    usable_boundaries,
    usable_boundary,
)

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


@frozen(kw_only=True)
class GroupChain:
    """A prompt's blocks in one group of layers."""

    group: KvGroup
    keys: Sequence[BlockKey]
    """Those of the group's full blocks, from the prompt's first."""
    on_device: Container[int] = ()
    """The numbers of blocks that the engine's own memory has, such as a range."""

    def there(self, holders: Sequence[int | None]) -> list[bool]:
        """Of each block, whether the device or one of the tiers ``holders`` has it."""
        return [tier is not None or number in self.on_device for number, tier in enumerate(holders)]


@frozen(kw_only=True)
class GroupPlan:
    """The blocks to load, of all groups, before a prompt is computed from ``boundary`` on."""

    load_id: str
    boundary: int
    """In tokens. Without blocks: how far the device's own serve all groups."""
    shared: int = 0
    """The last boundary up to which the groups that need the whole prefix have it, in tokens. Where
    it is later than any that all groups can serve, this prompt parts from others, or goes on after
    them, where a window or a state was not kept."""
    places: tuple[tuple[int, int], ...] = ()
    """Group and number in the prompt of each block."""
    blocks: tuple[tuple[BlockKey, int], ...] = ()
    """Each block and its tier."""
    reason: str
    """Why the boundary is not later, or "everything"."""


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
        self._begin(load_id, planned, now_s)
        return OnboardPlan(load_id=load_id, blocks=planned, reason=reason)

    def begin_groups(
        self,
        load_id: str,
        chains: Sequence[GroupChain],
        limit_tokens: int,
        now_s: float,
        token_s: float | None,
    ) -> GroupPlan:
        """As ``begin``, for a model with groups: chooses a boundary, and what all need there."""
        if load_id in self.running:
            raise ValueError(f"the load {load_id} is running: finish it first")
        found = _Found(self.index, chains, limit_tokens)
        missing = "everything" if found.last + found.step > limit_tokens else "nothing there"
        if found.last <= found.on_device:
            return GroupPlan(
                load_id=load_id, boundary=found.on_device, shared=found.shared, reason=missing
            )
        costs = {tier: self.index.pools[tier].speed.cost for tier in found.tiers}
        boundary, reason = found.cheapest(costs, token_s), missing
        if boundary < found.last:
            reason = "slower than recompute"
            boundary = self._group_probe(found, boundary, now_s)
            counted = Counter(found.loads(found.last)) - Counter(found.loads(boundary))
            for tier, left in counted.items():
                count(self.index.pools[tier].counts.not_loaded, reason, left)
        places = found.places(boundary) if boundary > found.on_device else []
        planned = tuple((chains[group].keys[n], tier) for group, n, tier in places)
        self._begin(load_id, planned, now_s)
        return GroupPlan(
            load_id=load_id,
            boundary=boundary,
            shared=found.shared,
            places=tuple((group, n) for group, n, _ in places),
            blocks=planned,
            reason=reason,
        )

    def _begin(self, load_id: str, planned: tuple[tuple[BlockKey, int], ...], now_s: float) -> None:
        """Pin the blocks of a load until ``finish``; nothing runs where there are none."""
        for key, tier in planned:
            self.index.pools[tier].pin(key)
        if planned:
            self.running[load_id] = _Running(planned, now_s)

    def _group_probe(self, found: _Found, chosen: int, now_s: float) -> int:
        """The boundary to load up to, where that measures a slow tier again; else ``chosen``."""
        for boundary in found.boundaries:
            if boundary > chosen:
                tiers = sorted(set(found.loads(boundary)))
                if any(self._is_due(tier, now_s) for tier in tiers):
                    return boundary
        return chosen

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
            if self._is_due(tier, now_s):
                return min(len(tiers), position + PROBE_BLOCKS), tier
        return None

    def _is_due(self, tier: int, now_s: float) -> bool:
        """Whether a slow tier is to be measured again; notes that it is."""
        measured_s = self.index.pools[tier].speed.measured_s
        last_s = max(
            self._probed_s.get(tier, float("-inf")),
            float("-inf") if measured_s is None else measured_s,
        )
        if now_s - last_s < self._probe_interval_s:
            return False
        self._probed_s[tier] = now_s
        return True

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


class _Found:
    """What device and tiers have of a prompt's groups, and what loading it costs."""

    def __init__(self, index: BlockIndex, chains: Sequence[GroupChain], limit_tokens: int) -> None:
        self._chains = chains
        groups = [chain.group for chain in chains]
        self.step = alignment(groups)
        self._holders = [
            index.holders(chain.keys[: limit_tokens // chain.group.block_size]) for chain in chains
        ]
        nowhere = [[None] * len(held) for held in self._holders]
        device = [chain.there(held) for chain, held in zip(chains, nowhere, strict=True)]
        there = [chain.there(held) for chain, held in zip(chains, self._holders, strict=True)]
        self.on_device = usable_boundary(groups, device, limit_tokens)
        """The boundary that the device serves alone."""
        self.shared = shared_boundary(groups, there, limit_tokens)
        usable = usable_boundaries(groups, there, limit_tokens)
        self.boundaries = sorted(at for at in usable if at > self.on_device)
        """Those that tiers serve beyond it, the first one first."""
        self.last = self.boundaries[-1] if self.boundaries else self.on_device
        self._loaded = [
            [None if number in chain.on_device else tier for number, tier in enumerate(held)]
            for chain, held in zip(chains, self._holders, strict=True)
        ]
        self.tiers = sorted({t for held in self._loaded for t in held if t is not None})
        self._counts = {
            tier: [[0, *accumulate(t == tier for t in held)] for held in self._loaded]
            for tier in self.tiers
        }

    def places(self, boundary: int) -> list[tuple[int, int, int]]:
        """Group, number and tier of each block to load for a boundary."""
        return [
            (group, number, tier)
            for group, chain in enumerate(self._chains)
            for number in chain.group.needed(boundary)
            if (tier := self._loaded[group][number]) is not None
        ]

    def loads(self, boundary: int) -> dict[int, int]:
        """How many blocks each tier loads for a boundary."""
        found = {}
        for tier, counts in self._counts.items():
            ranges = [chain.group.needed(boundary) for chain in self._chains]
            blocks = sum(
                sums[needed.stop] - sums[needed.start]
                for sums, needed in zip(counts, ranges, strict=True)
            )
            if blocks:
                found[tier] = blocks
        return found

    def cheapest(self, costs: Mapping[int, LoadCost | None], token_s: float | None) -> int:
        """The boundary from which loading and computing the rest take the least time.

        As ``best_prefix``: tiers load in parallel, and one of unknown cost counts as free.
        """
        if token_s is None:
            return self.last
        best, least = self.on_device, (self.last - self.on_device) * token_s
        for boundary in self.boundaries:
            known = ((costs[tier], blocks) for tier, blocks in self.loads(boundary).items())
            load_s = max((c.of(n) for c, n in known if c is not None), default=0.0)
            total = load_s + (self.last - boundary) * token_s
            if total <= least:
                best, least = boundary, total
        return best


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
    index: BlockIndex,
    stores: OffloadScheduler,
    blocks: Iterable[tuple[BlockKey, int]],
    spared: Collection[BlockKey],
    now_s: float,
) -> list[Action]:
    """Copy blocks, each with its tier, from slower tiers to the fastest writable tier.

    The sources keep their copies. No block of ``spared``, the prompt's, is evicted for another.
    """
    target = _target(index)
    if target is None:
        return []
    actions: list[Action] = []
    room = int(_MOST_SHARE * target.capacity) - target.staged - len(target.waiting)
    for key, tier in blocks:
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


def group_blocks(
    index: BlockIndex, chains: Sequence[GroupChain], limit_tokens: int
) -> list[tuple[BlockKey, int]]:
    """What tiers have of the blocks that are needed at the last boundary which can be served."""
    found = _Found(index, chains, limit_tokens)
    return [(chains[group].keys[n], tier) for group, n, tier in found.places(found.last)]


def _target(index: BlockIndex) -> TierBlockPool | None:
    written = (pool for pool in index.pools if pool.spec.write != "never")
    fastest = next((pool for pool in written if pool.up), None)
    return fastest if fastest is not None and fastest.spec.prefetch else None

"""The way of blocks back to the device: what to load, and what a finished load teaches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from attrs import define, frozen

from commutator.kv.actions import Action
from commutator.kv.admission import UseCounts
from commutator.kv.break_even import BreakEven, PrefillSpeed, best_prefix
from commutator.kv.counters import count
from commutator.kv.index import BlockIndex
from commutator.kv.keys import BlockKey
from commutator.kv.load_result import LoadResult
from commutator.kv.tier_book import TierBook

__all__ = ["LoadPlan", "LoadSide"]

PROBE_BLOCKS = 8
"""So many blocks are loaded to measure a tier again that was too slow."""


@frozen(kw_only=True)
class LoadPlan:
    """What to load before a prompt is computed."""

    load_id: str
    blocks: tuple[tuple[BlockKey, int], ...]
    """Each block and the tier to read it from; none when there is nothing worth loading."""
    reason: str
    """Why not more, or "everything"."""
    load_s: float = 0.0
    """Predicted time to load every block that was found."""
    prefill_s: float | None = None
    """Predicted time to compute the same blocks; None when it is not known."""


@define
class _Running:
    blocks: tuple[tuple[BlockKey, int], ...]
    begun_s: float


class LoadSide:
    """Pins what is being loaded, and measures the tiers by what was."""

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
        prefill: PrefillSpeed,
    ) -> LoadPlan:
        """Choose and pin. A plan without blocks is not to be finished."""
        if load_id in self.running:
            raise ValueError(f"the load {load_id} runs already: finish it first")
        tiers = self.index.match(keys, first)
        missing = self._why_no_more(keys, first + len(tiers))
        if not tiers:
            return LoadPlan(load_id=load_id, blocks=(), reason=missing)
        costs = {tier: self.index.books[tier].speed.cost for tier in set(tiers)}
        gate = best_prefix(tiers, costs, prefill)
        blocks, reason = gate.blocks, missing
        if blocks < len(tiers):
            reason = _slower(gate, len(tiers))
            if (probe := self._probe(tiers, blocks, now_s)) is not None:
                blocks, tier = probe
                reason = f"to measure {self.index.books[tier].spec.name} again; {reason}"
            for tier, left in Counter(tiers[blocks:]).items():
                counts = self.index.books[tier].counts
                count(counts.not_loaded, "slower than recompute", left)
        planned = tuple(zip(keys[first : first + blocks], tiers[:blocks], strict=True))
        for key, tier in planned:
            self.index.books[tier].pin(key)
        if planned:
            self.running[load_id] = _Running(planned, now_s)
        return LoadPlan(
            load_id=load_id,
            blocks=planned,
            reason=reason,
            load_s=gate.load_s,
            prefill_s=gate.prefill_s,
        )

    def finish(
        self,
        load_id: str,
        results: Mapping[BlockKey, LoadResult],
        now_s: float,
        seconds: Mapping[int, float] | None,
    ) -> list[Action]:
        """Unpin, count, and forget what the tiers turned out not to have."""
        load = self.running.pop(load_id, None)
        if load is None:
            raise ValueError(f"there is no load {load_id}: it was finished, or had no blocks")
        by_tier: dict[int, list[BlockKey]] = {}
        for key, tier in reversed(load.blocks):  # the last of a chain is used first: see eviction
            by_tier.setdefault(tier, []).append(key)
        if seconds is None:
            alone = len(by_tier) == 1
            seconds = dict.fromkeys(by_tier, now_s - load.begun_s) if alone else {}
        actions: list[Action] = []
        for tier, keys in by_tier.items():
            book = self.index.books[tier]
            outcomes = [results.get(key) for key in keys]
            self._learn(book, keys, outcomes, now_s)
            if tier in seconds and set(outcomes) == {LoadResult.LOADED}:
                book.speed.measured(len(keys), seconds[tier], now_s)
            actions += self.index.unpin(book, keys)
            for bad in (LoadResult.CORRUPT, LoadResult.MISSING):
                those = [key for key, result in zip(keys, outcomes, strict=True) if result is bad]
                actions += self.index.unpublish(book, those, bad.value)
        return actions

    def _learn(
        self,
        book: TierBook,
        keys: Sequence[BlockKey],
        outcomes: Sequence[LoadResult | None],
        now_s: float,
    ) -> None:
        for key, result in zip(keys, outcomes, strict=True):
            count(book.counts.loads, result.value if result is not None else "not run")
            if result is LoadResult.LOADED:
                if key in book.prefetched:
                    book.prefetched.remove(key)
                    count(book.counts.prefetched, "used")
                if self._uses is not None:
                    self._uses.used(key)
                if self.index.is_published(book, key):
                    self.index.nodes[key].loaded = True
                    book.touched(key, now_s)

    def _probe(self, tiers: Sequence[int], chosen: int, now_s: float) -> tuple[int, int] | None:
        """How many blocks to load so that a slow tier is measured again, and that tier."""
        for position in range(chosen, len(tiers)):
            tier = tiers[position]
            measured_s = self.index.books[tier].speed.measured_s
            last_s = max(
                self._probed_s.get(tier, float("-inf")),
                float("-inf") if measured_s is None else measured_s,
            )
            if now_s - last_s < self._probe_interval_s:
                continue
            self._probed_s[tier] = now_s
            return min(len(tiers), position + PROBE_BLOCKS), tier
        return None

    def _why_no_more(self, keys: Sequence[BlockKey], position: int) -> str:
        if position >= len(keys):
            return "everything"
        node = self.index.nodes.get(keys[position])
        if node is None:
            return "nothing there"
        if node.published:
            lowest = (node.published & -node.published).bit_length() - 1
            book = self.index.books[lowest]
            count(book.counts.not_loaded, "tier is down")
            return f"{book.spec.name} is down"
        return "being stored" if node.staged else "being evicted"


def _slower(gate: BreakEven, found: int) -> str:
    prefill_s = gate.prefill_s or 0.0
    text = f"slower than recompute: {gate.load_s * 1e3:.1f} ms against {prefill_s * 1e3:.1f} ms"
    return f"{text} for all {found} blocks" if gate.blocks else text

"""Whether loading blocks is faster than computing them again, from measured speeds of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

__all__ = ["BreakEven", "LoadCost", "LoadSpeed", "PrefillSpeed", "best_prefix"]

_FORGETTING = 0.9
"""A measurement counts so much less with each later one."""
_SPREAD = 1e-3
"""Below this relative variance of batch sizes, latency cannot be told from bandwidth."""


@frozen(kw_only=True)
class PrefillSpeed:
    """How fast the engine computes prompts, as measured."""

    tokens_per_s: float | None
    """None while it is not known: then everything is loaded."""
    block_size: int
    """Tokens in a block."""
    overlap: float = 0.0
    """Part of a load's time, from 0 to 1, that hides behind what the engine computes meanwhile."""

    @property
    def block_s(self) -> float | None:
        """Time to compute one block."""
        return self.block_size / self.tokens_per_s if self.tokens_per_s else None


@frozen(kw_only=True)
class LoadCost:
    """A load of n blocks takes ``latency_s + n * block_s``."""

    latency_s: float
    block_s: float

    def of(self, blocks: int) -> float:
        return self.latency_s + blocks * self.block_s if blocks else 0.0


class LoadSpeed:
    """The cost of loads from one tier: a line fitted to the loads measured last.

    Least squares over (blocks, seconds) with exponential forgetting; neither part is negative.
    """

    def __init__(self, guess: LoadCost | None = None) -> None:
        self.cost = guess
        """None before the first measurement."""
        self.measured_s: float | None = None
        """When it was measured last."""
        self._weight = self._n = self._t = self._nn = self._nt = 0.0
        if guess is not None:
            for blocks in (1, 64):
                self._add(blocks, guess.of(blocks))

    def measured(self, blocks: int, seconds: float, now_s: float) -> None:
        """``blocks`` were loaded together in ``seconds``."""
        if blocks < 1 or seconds < 0:
            return
        self._add(blocks, seconds)
        self.cost = self._fitted()
        self.measured_s = now_s

    def _add(self, blocks: int, seconds: float) -> None:
        keep = _FORGETTING
        self._weight = self._weight * keep + 1
        self._n = self._n * keep + blocks
        self._t = self._t * keep + seconds
        self._nn = self._nn * keep + blocks * blocks
        self._nt = self._nt * keep + blocks * seconds

    def _fitted(self) -> LoadCost:
        spread = self._weight * self._nn - self._n * self._n
        if spread <= _SPREAD * self._n * self._n:
            return LoadCost(latency_s=0.0, block_s=self._t / self._n)
        slope = (self._weight * self._nt - self._n * self._t) / spread
        if slope <= 0:
            return LoadCost(latency_s=self._t / self._weight, block_s=0.0)
        latency_s = (self._t - slope * self._n) / self._weight
        if latency_s <= 0:
            return LoadCost(latency_s=0.0, block_s=self._nt / self._nn)
        return LoadCost(latency_s=latency_s, block_s=slope)


@frozen(kw_only=True)
class BreakEven:
    """How many of the blocks found are worth loading."""

    blocks: int
    load_s: float
    """Predicted time to load all that were found."""
    prefill_s: float | None
    """Predicted time to compute them; None when it is not known."""


def best_prefix(
    tiers: Sequence[int], costs: Mapping[int, LoadCost | None], prefill: PrefillSpeed
) -> BreakEven:
    """The longest prefix for which loading it and computing the rest takes least time.

    ``tiers`` has the tier of each block. Tiers load at the same time, each in one batch; one whose
    cost is not known counts as free, so that it gets measured.
    """
    block_s = prefill.block_s
    waiting = 1.0 - prefill.overlap
    counts: dict[int, int] = {}
    seconds: dict[int, float] = {}
    best, least, load_s = 0, float("inf"), 0.0
    if block_s is not None:
        least = len(tiers) * block_s
    for number, tier in enumerate(tiers, start=1):
        counts[tier] = counts.get(tier, 0) + 1
        cost = costs.get(tier)
        seconds[tier] = cost.of(counts[tier]) if cost is not None else 0.0
        load_s = max(load_s, seconds[tier])
        total = load_s * waiting + (len(tiers) - number) * (block_s or 0.0)
        if block_s is None or total <= least:
            best, least = number, total
    prefill_s = None if block_s is None else len(tiers) * block_s
    return BreakEven(blocks=best, load_s=load_s, prefill_s=prefill_s)

"""Whether loading blocks is faster than recomputing them, from measured speeds of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

__all__ = ["BreakEven", "LoadCost", "LoadSpeed", "PrefillSpeed", "best_prefix"]

_FORGETTING = 0.9
"""The weight of a measurement is multiplied by this at each later one."""

_SPREAD = 1e-3
"""Below this relative variance of batch sizes, latency cannot be separated from bandwidth."""


@frozen(kw_only=True)
class PrefillSpeed:
    """The measured speed at which the engine computes prompts."""

    tokens_per_s: float | None
    """None while unknown: then everything is loaded."""
    block_size: int
    """Tokens in a block."""

    @property
    def block_s(self) -> float | None:
        """Seconds to compute one block; None while unknown."""
        return self.block_size / self.tokens_per_s if self.tokens_per_s else None


@frozen(kw_only=True)
class LoadCost:
    """A load of n blocks takes ``latency_s + n * block_s``."""

    latency_s: float
    block_s: float

    def of(self, blocks: int) -> float:
        return self.latency_s + blocks * self.block_s if blocks else 0.0


class LoadSpeed:
    """The cost of loads from one tier: a line fitted to the latest loads.

    Least squares over (blocks, seconds) with exponential forgetting; neither part is negative.
    """

    def __init__(self, guess: LoadCost | None = None) -> None:
        self.cost = guess
        """None before the first measurement."""
        self.measured_s: float | None = None
        """When a load was last measured."""
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
    """Predicted seconds to load all blocks found."""
    prefill_s: float | None
    """Predicted seconds to compute them; None while unknown."""


def best_prefix(
    tiers: Sequence[int], costs: Mapping[int, LoadCost | None], prefill: PrefillSpeed
) -> BreakEven:
    """The longest prefix for which loading it and computing the rest takes the least time.

    ``tiers`` has the tier of each block. Tiers load in parallel, each in one batch. A tier of
    unknown cost counts as free, so that its loads get measured.
    """
    block_s = prefill.block_s
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
        total = load_s + (len(tiers) - number) * (block_s or 0.0)
        if block_s is None or total <= least:
            best, least = number, total
    prefill_s = None if block_s is None else len(tiers) * block_s
    return BreakEven(blocks=best, load_s=load_s, prefill_s=prefill_s)

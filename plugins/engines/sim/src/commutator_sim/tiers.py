"""Memory behind the device: takes evicted blocks, gives them back over a link of one speed.

Offloading costs no time (it runs beside the steps); loading does, one transfer after the other.
A block that is loaded stays in its tier until it is the least recently used there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field

from commutator_sim.events import DEVICE, Offloaded, Removed
from commutator_sim.parameters import TierParameters

__all__ = ["OffloadTiers"]


@define(eq=False)
class _Tier:
    parameters: TierParameters
    blocks: OrderedDict[int, None] = field(factory=OrderedDict)
    """Least recently used first."""
    link_free_ns: int = 0


class OffloadTiers:
    """The tiers, fastest first; each overflows into the next and the last one forgets."""

    def __init__(self, parameters: Sequence[TierParameters]) -> None:
        self._tiers = [_Tier(tier) for tier in parameters]

    def match(self, keys: Sequence[int], first: int, limit: int) -> int:
        """How many keys from ``first`` on, up to ``limit``, are in any tier without a gap."""
        if not self._tiers:
            return 0
        for index in range(first, limit):
            if not any(keys[index] in tier.blocks for tier in self._tiers):
                return index - first
        return max(0, limit - first)

    def load(self, keys: Sequence[int], now_ns: int) -> int:
        """Begin to bring ``keys`` to the device, each from the fastest tier that has it.

        Returns when the last of them is there.
        """
        ready_ns = now_ns
        for key in keys:
            tier = next(tier for tier in self._tiers if key in tier.blocks)
            tier.blocks.move_to_end(key)
            tier.link_free_ns = max(tier.link_free_ns, now_ns) + tier.parameters.load_block_ns
            ready_ns = max(ready_ns, tier.link_free_ns)
        return ready_ns

    def evict(self, keys: Sequence[int], now_ns: int) -> list[Offloaded | Removed]:
        """``keys`` leave the device; returns what that changes in the tiers and there.

        Copies are told of before what they were copied from is gone, and no tier ever overflows.
        """
        events: list[Offloaded | Removed] = []
        self._put(0, keys, now_ns, events)
        events.append(Removed(now_ns, DEVICE, tuple(keys)))
        return events

    def clear(self, now_ns: int) -> list[Removed]:
        """Forget every block."""
        held = [(tier.parameters.name, tuple(tier.blocks)) for tier in self._tiers]
        for tier in self._tiers:
            tier.blocks.clear()
        return [Removed(now_ns, name, blocks) for name, blocks in held if blocks]

    def _put(
        self, depth: int, keys: Sequence[int], now_ns: int, events: list[Offloaded | Removed]
    ) -> None:
        if depth == len(self._tiers) or not keys:
            return
        tier = self._tiers[depth]
        capacity, blocks = tier.parameters.capacity_blocks, tier.blocks
        fresh = []
        for key in keys:
            if key in blocks:
                blocks.move_to_end(key)
            else:
                fresh.append(key)
        kept = fresh[-capacity:]
        dropped = [blocks.popitem(last=False)[0] for _ in range(len(blocks) + len(kept) - capacity)]
        self._put(depth + 1, dropped + fresh[: len(fresh) - len(kept)], now_ns, events)
        if dropped:
            events.append(Removed(now_ns, tier.parameters.name, tuple(dropped)))
        if kept:
            events.append(Offloaded(now_ns, tier.parameters.name, tuple(kept)))
        blocks.update(dict.fromkeys(kept))

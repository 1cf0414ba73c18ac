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
        """``keys`` leave the device; returns what that changes there and in every tier."""
        changes: list[tuple[type[Offloaded | Removed], str, int]] = []
        for key in keys:
            self._put(0, key, changes)
            changes.append((Removed, DEVICE, key))
        return _grouped(changes, now_ns)

    def clear(self, now_ns: int) -> list[Removed]:
        """Forget every block."""
        held = [(tier.parameters.name, tuple(tier.blocks)) for tier in self._tiers]
        for tier in self._tiers:
            tier.blocks.clear()
        return [Removed(now_ns, name, blocks) for name, blocks in held if blocks]

    def _put(
        self, depth: int, key: int, changes: list[tuple[type[Offloaded | Removed], str, int]]
    ) -> None:
        if depth == len(self._tiers):
            return
        tier = self._tiers[depth]
        name = tier.parameters.name
        if key in tier.blocks:
            tier.blocks.move_to_end(key)
            return
        if len(tier.blocks) == tier.parameters.capacity_blocks:
            oldest, _ = tier.blocks.popitem(last=False)
            self._put(depth + 1, oldest, changes)
            changes.append((Removed, name, oldest))
        tier.blocks[key] = None
        changes.append((Offloaded, name, key))


def _grouped(
    changes: Sequence[tuple[type[Offloaded | Removed], str, int]], now_ns: int
) -> list[Offloaded | Removed]:
    """Neighbouring changes of one kind in one tier as one event."""
    events: list[Offloaded | Removed] = []
    start = 0
    for end in range(1, len(changes) + 1):
        if end == len(changes) or changes[end][:2] != changes[start][:2]:
            kind, tier, _ = changes[start]
            events.append(kind(now_ns, tier, tuple(key for _, _, key in changes[start:end])))
            start = end
    return events

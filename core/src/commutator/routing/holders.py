"""Who holds a block, in which tier: immutable sets, shared by all blocks with the same holders."""

from __future__ import annotations

from weakref import WeakValueDictionary

from commutator.kv.medium import Tier

__all__ = ["NOBODY", "HolderSets", "Holders"]

Masks = tuple[int, ...]
"""For each tier the slots that hold the block in it, as a bit mask."""


class Holders:
    """One set of holders. Equal sets of one ``HolderSets`` are the same object."""

    __slots__ = ("__weakref__", "all", "best", "lower", "masks")

    def __init__(self, masks: Masks) -> None:
        self.masks = masks
        seen = 0
        best: list[int] = []
        for mask in masks:
            best.append(mask & ~seen)
            seen |= mask
        self.all = seen
        self.best = best
        """Each slot stands in the mask of its fastest tier only."""
        self.lower = seen & ~masks[Tier.DEVICE]
        """Slots that hold the block, but not on the device."""


NOBODY = Holders((0,) * len(Tier))


class HolderSets:
    """Makes holder sets, and forgets those that no block uses any more."""

    def __init__(self) -> None:
        self._sets: WeakValueDictionary[Masks, Holders] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._sets)

    def of(self, masks: Masks) -> Holders | None:
        """The set with these masks; None when they are empty."""
        found = self._sets.get(masks)
        if found is None and any(masks):
            found = self._sets[masks] = Holders(masks)
        return found

    def adding(self, holders: Holders | None, tier: Tier, bit: int) -> Holders:
        """``holders`` and the slot of ``bit`` in ``tier``."""
        masks = list((holders or NOBODY).masks)
        masks[tier] |= bit
        added = self.of(tuple(masks))
        assert added is not None
        return added

    def removing(self, holders: Holders, tier: Tier, bit: int) -> Holders | None:
        """``holders`` without the slot of ``bit`` in ``tier``; None when nobody is left."""
        masks = list(holders.masks)
        masks[tier] &= ~bit
        return self.of(tuple(masks))

"""Maps a block's sequence hash to its holders, and finds every holder's longest prefix at once.

Holders are numbered slots in bit masks: one dictionary look-up serves all of them. Equal holder
sets are one object, so a block with the same holders as the one before it costs one ``is``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from weakref import WeakValueDictionary

from commutator.contract.block import CacheLevel

__all__ = [
    "NO_HOLDERS",
    "Ended",
    "HolderSets",
    "Holders",
    "PrefixMap",
    "slots_of",
]

_FEW = 2  # an itemgetter of one key returns no tuple


Ended = tuple[int, int]
"""Slots, as a bit mask, and the length of their prefix in blocks."""


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
        """For each tier, the slots for which it is the fastest that holds the block."""
        self.lower = seen & ~masks[CacheLevel.DEVICE]
        """Slots that hold the block, but not on the device."""


class PrefixMap:
    """The blocks with at least one holder. A block without holders takes no memory."""

    def __init__(self) -> None:
        self._holders: dict[int, Holders] = {}
        self._sets = HolderSets()

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def distinct_sets(self) -> int:
        """The number of different holder sets."""
        return len(self._sets)

    def holders(self, sequence_hash: int) -> Holders | None:
        return self._holders.get(sequence_hash)

    def add(self, slot: int, tier: CacheLevel, hashes: Iterable[int]) -> list[int]:
        """``slot`` holds these blocks in ``tier``; returns those that it held there before."""
        bit = 1 << slot
        known = self._holders
        repeated: list[int] = []
        before: object = self  # a marker for "no block yet", because None is a valid value
        after: Holders | None = None
        for sequence_hash in hashes:
            holders = known.get(sequence_hash)
            if holders is not before:
                before = holders
                held = holders is not None and holders.masks[tier] & bit
                after = None if held else self._sets.adding(holders, tier, bit)
            if after is None:
                repeated.append(sequence_hash)
            else:
                known[sequence_hash] = after
        return repeated

    def remove(self, slot: int, tier: CacheLevel, hashes: Iterable[int]) -> None:
        """``slot`` no longer holds these blocks in ``tier``; it must have held each of them."""
        bit = 1 << slot
        known = self._holders
        before: Holders | None = None
        after: Holders | None = None
        for sequence_hash in hashes:
            holders = known[sequence_hash]
            if holders is not before:
                before = holders
                after = self._sets.removing(holders, tier, bit)
            if after is None:
                del known[sequence_hash]
            else:
                known[sequence_hash] = after

    def match(self, hashes: Sequence[int]) -> tuple[list[Ended], dict[int, list[int]]]:
        """The longest prefix of ``hashes`` that each slot holds without a gap.

        Slots with the same length share one entry; slots that hold nothing have none. The second
        result gives, for slots with blocks in lower tiers, the number of the prefix's blocks whose
        fastest tier is each tier below the device.
        """
        ended: list[Ended] = []
        lower: defaultdict[int, list[int]] = defaultdict(lambda: [0] * len(CacheLevel))
        alive, current, depth = 0, NO_HOLDERS, 0
        for holders, blocks in self._runs(hashes):
            if holders is current:
                depth += blocks
                continue
            staying = alive & holders.all if depth else holders.all
            if gone := alive & ~staying:
                ended.append((gone, depth))
            if current.lower or holders.lower:
                _change_holders(lower, depth, (current, alive), (holders, staying))
            alive, current = staying, holders
            if not alive:
                break
            depth += blocks
        if alive:
            ended.append((alive, depth))
            if current.lower:
                _change_holders(lower, depth, (current, alive), (NO_HOLDERS, 0))
        return ended, lower

    def _runs(self, hashes: Sequence[int]) -> Iterator[tuple[Holders, int]]:
        """Runs of blocks with the same holders, up to the first block without holders."""
        found = self._known_prefix(hashes)
        if not found:
            return
        current, begun = found[0], 0
        # ``count`` is slow where sets differ; comparing the last one first avoids it.
        if found[-1] is not current or found.count(current) < len(found):
            for number, holders in enumerate(found):
                if holders is not current:
                    yield current, number - begun
                    current, begun = holders, number
        yield current, len(found) - begun

    def _known_prefix(self, hashes: Sequence[int]) -> tuple[Holders, ...]:
        """The holders of each block up to the first block without holders.

        An ``itemgetter`` looks up many keys at once if all exist. Prompts lose their last blocks
        first, so bisection nearly always finds how many exist, and never finds too few.
        """
        known = self._holders
        if hashes and hashes[-1] not in known:
            hashes = hashes[: bisect_left(hashes, True, key=lambda block: block not in known)]
        if len(hashes) < _FEW:
            return tuple(known[block] for block in hashes)
        found: tuple[Holders, ...]
        try:
            found = itemgetter(*hashes)(known)
        except KeyError:  # a block in the middle is missing
            found = tuple(iter(map(known.get, hashes).__next__, None))
        return found


def slots_of(mask: int) -> Iterator[int]:
    """The slots in a bit mask, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit


def _change_holders(
    lower: defaultdict[int, list[int]],
    depth: int,
    before: tuple[Holders, int],
    after: tuple[Holders, int],
) -> None:
    """Holders and slots still alive change at ``depth``.

    A stretch in a lower tier is counted as its end minus its start, so that only slots that enter
    or leave a tier cost anything.
    """
    for tier in (CacheLevel.HOST, CacheLevel.DISK, CacheLevel.EXTERNAL):
        left = before[0].best[tier] & before[1]
        entered = after[0].best[tier] & after[1]
        changed = left ^ entered
        while changed:
            bit = changed & -changed
            lower[bit.bit_length() - 1][tier] += depth if left & bit else -depth
            changed ^= bit


NO_HOLDERS = Holders((0,) * len(CacheLevel))


class HolderSets:
    """Makes holder sets, and drops those that no block uses."""

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

    def adding(self, holders: Holders | None, tier: CacheLevel, bit: int) -> Holders:
        """``holders`` and the slot of ``bit`` in ``tier``."""
        masks = list((holders or NO_HOLDERS).masks)
        masks[tier] |= bit
        added = self.of(tuple(masks))
        assert added is not None
        return added

    def removing(self, holders: Holders, tier: CacheLevel, bit: int) -> Holders | None:
        """``holders`` without the slot of ``bit`` in ``tier``; None when no holder is left."""
        masks = list(holders.masks)
        masks[tier] &= ~bit
        return self.of(tuple(masks))

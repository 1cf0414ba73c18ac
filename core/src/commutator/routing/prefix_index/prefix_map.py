"""Maps a block's sequence hash to its holders, and finds every holder's longest prefix at once.

Holders are numbered slots in bit masks: one dictionary look-up serves all of them. Equal holder
sets are one object, so a block with the same holders as the one before it costs one ``is``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import and_, attrgetter, itemgetter, or_
from weakref import WeakValueDictionary

from attrs import define

from commutator.contract.block import CacheLevel
from commutator.contract.routing import Overlap, on_device

_FEW = 2  # an itemgetter of one key returns no tuple

_NOTHING = Overlap()
_all_of = attrgetter("all")
_lower_of = attrgetter("lower")

Masks = tuple[int, ...]
"""For each tier the slots that hold the block in it, as a bit mask."""


class Holders:
    """One set of holders. Equal sets of one ``PrefixMap`` are the same object."""

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


class PrefixMatch:
    """The longest prefix of one prompt that each slot holds without a gap."""

    __slots__ = ("depths", "lower", "reach")

    def __init__(
        self,
        reach: Sequence[int] = (),
        depths: Sequence[int] = (),
        lower: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.reach = reach
        """The slots that hold at least as many blocks of the prompt as ``depths`` says at the same
        place, as a bit mask; never 0. Each mask is a part of the one before, or equal to it."""
        self.depths = depths
        """Numbers of blocks, ascending."""
        self.lower = lower or {}
        """For slots with blocks in lower tiers: the number of the prefix's blocks whose fastest
        tier is each tier below the device."""

    def level(self, slots: int, most: int | None = None) -> int:
        """The place of the longest prefix of any of ``slots`` in the first ``most`` of ``reach``.

        -1 if none of them holds anything.
        """
        reach = self.reach
        low, high = 0, len(reach) if most is None else most
        while low < high:
            middle = (low + high) // 2
            if reach[middle] & slots:
                low = middle + 1
            else:
                high = middle
        return low - 1

    def longest(self, slots: int) -> int:
        """The longest prefix of any of ``slots``, in blocks."""
        level = self.level(slots)
        return 0 if level < 0 else self.depths[level]

    def overlap(self, slot: int) -> Overlap:
        """The overlap of one slot."""
        blocks = self.longest(1 << slot)
        return self._overlap(slot, blocks) if blocks else _NOTHING

    def ended(self) -> Iterator[tuple[int, int]]:
        """The slots of each length of a prefix, and that length in blocks; longest first."""
        longer = 0
        for slots, blocks in zip(reversed(self.reach), reversed(self.depths), strict=True):
            if slots != longer:
                yield slots & ~longer, blocks
                longer = slots

    def overlaps(self) -> dict[int, Overlap]:
        """The overlap of each slot that holds anything."""
        found: dict[int, Overlap] = {}
        for slots, blocks in self.ended():
            found |= dict.fromkeys(slots_of(slots), on_device(blocks))
        for slot in self.lower:
            found[slot] = self._overlap(slot, found[slot].device)
        return found

    def _overlap(self, slot: int, blocks: int) -> Overlap:
        if (below := self.lower.get(slot)) is None:
            return on_device(blocks)
        _, host, disk, external = below
        device = blocks - host - disk - external
        return Overlap(device=device, host=host, disk=disk, external=external)


NOTHING_HELD = PrefixMatch()


class PrefixMap:
    """The blocks with at least one holder. A block without holders takes no memory."""

    def __init__(self) -> None:
        self._holders: dict[int, Holders] = {}
        self._sets: WeakValueDictionary[Masks, Holders] = WeakValueDictionary()
        """Those that any block uses."""
        self.has_lower = False
        """Whether any block has ever been in a tier below the device."""

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, sequence_hash: int) -> Holders | None:
        return self._holders.get(sequence_hash)

    def add(self, slot: int, tier: CacheLevel, hashes: Iterable[int]) -> list[int]:
        """``slot`` holds these blocks in ``tier``; returns those that it held there before."""
        bit = 1 << slot
        self.has_lower |= tier is not CacheLevel.DEVICE
        known = self._holders
        repeated: list[int] = []
        before: object = self  # a marker for "no block yet", because None is a valid value
        after: Holders | None = None
        for sequence_hash in hashes:
            holders = known.get(sequence_hash)
            if holders is not before:
                before = holders
                held = holders is not None and holders.masks[tier] & bit
                after = None if held else self._adding(holders, tier, bit)
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
                after = self._removing(holders, tier, bit)
            if after is None:
                del known[sequence_hash]
            else:
                known[sequence_hash] = after

    def _adding(self, holders: Holders | None, tier: CacheLevel, bit: int) -> Holders:
        """``holders`` and the slot of ``bit`` in ``tier``."""
        masks = list((holders or NO_HOLDERS).masks)
        masks[tier] |= bit
        return self._set_of(tuple(masks))

    def _removing(self, holders: Holders, tier: CacheLevel, bit: int) -> Holders | None:
        """``holders`` without the slot of ``bit`` in ``tier``; None when no holder is left."""
        masks = list(holders.masks)
        masks[tier] &= ~bit
        return self._set_of(tuple(masks)) if any(masks) else None

    def _set_of(self, masks: Masks) -> Holders:
        found = self._sets.get(masks)
        if found is None:
            found = self._sets[masks] = Holders(masks)
        return found

    def match(self, hashes: Sequence[int], groups: Collection[LayerGroup] = ()) -> PrefixMatch:
        """The longest prefix that each slot holds without a gap, and its ``groups`` go on after."""
        found = self._known_prefix(hashes)
        if not found:
            return NOTHING_HELD
        first, last = found[0], found[-1]
        lower = self.has_lower and any(map(_lower_of, found))
        reach: list[int]
        depths: Sequence[int]
        if groups:
            held = list(accumulate(map(_all_of, found), and_))
            reach = usable(held, groups, hashes, list(map(_lower_of, found)))
            depths = range(1, len(found) + 1)
        # ``count`` is slow where sets differ; comparing the last one first avoids it.
        elif last is first and found.count(first) == len(found):
            reach, depths = [first.all], (len(found),)
        elif not lower and found[len(found) // 2] is found[len(found) // 2 - 1]:
            # Neighbours have equal sets, as where there are fewer workers than blocks.
            reach, depths = _reach_of_sets(found)
        else:
            reach, depths = list(accumulate(map(_all_of, found), and_)), range(1, len(found) + 1)
        if not reach[-1]:
            del reach[bisect_left(reach, True, key=lambda slots: not slots) :]
            depths = depths[: len(reach)]
        if not (lower and reach):
            return PrefixMatch(reach, depths)
        return PrefixMatch(reach, depths, _lower_blocks(found, reach, depths[-1]))

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


@define(eq=False)
class LayerGroup:
    """Layers that need no whole prefix on the slots of a bit mask, and which blocks these hold.

    They need a window or chunk of ``window`` tokens or, with 0, a state. A prompt is resumed after
    every ``step`` blocks of ``block_size`` tokens, where a block of the engine ends.
    """

    window: int
    chunked: bool
    block_size: int
    step: int
    map: PrefixMap
    slots: int = 0

    def serving(self, held: Sequence[int]) -> list[int]:
        """The slots that can go on after each block, from those that hold each block."""
        size, window = self.block_size, self.window
        if self.chunked and window:
            found, run = [], -1
            for blocks, mask in enumerate(held, 1):
                first = blocks * size // window * window // size
                run = -1 if first == blocks else mask if first == blocks - 1 else run & mask
                found.append(run)
            return found
        count = -(-(window - 1) // size) if window else 1
        if not count:
            return [-1] * len(held)
        # The last ``count`` blocks are the end of one part, and the start of the next.
        parts = [held[at : at + count] for at in range(0, len(held), count)]
        heads = [mask for part in parts for mask in accumulate(part, and_)]
        tails = [mask for part in parts for mask in [*accumulate(part[::-1], and_)][::-1]]
        return heads[:count] + list(map(and_, heads[count:], tails[1:]))


def usable(
    reach: Sequence[int], groups: Iterable[LayerGroup], hashes: Sequence[int], lower: Sequence[int]
) -> list[int]:
    """The slots that can go on after each block of a prompt, or after a later one. Pure.

    ``reach``: those that hold what other layers need. Where the last block is in a tier
    (``lower``), windows and states are taken to be, too: tiers tell nothing of them.
    """
    found = list(reach)
    for group in groups:
        held = [each.all if (each := group.map.holders(one)) else 0 for one in hashes[: len(reach)]]
        for at, mask in enumerate(group.serving(held)):
            found[at] &= (0 if (at + 1) % group.step else mask | lower[at]) | ~group.slots
    return list(accumulate(reversed(found), or_))[::-1]


def _reach_of_sets(found: Sequence[Holders]) -> tuple[list[int], list[int]]:
    """``PrefixMatch.reach`` and ``depths`` with one entry for each different set of ``found``.

    A set that comes again ends nobody's prefix, so only the first block of each counts.
    """
    sets, begin = dict.fromkeys(found), 0
    begins = [begin := found.index(one, begin) for one in sets]
    return list(accumulate(map(_all_of, sets), and_)), [*begins[1:], len(found)]


def slots_of(mask: int) -> Iterator[int]:
    """The slots in a bit mask, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit


def _lower_blocks(
    found: Sequence[Holders], reach: Sequence[int], blocks: int
) -> dict[int, list[int]]:
    """``PrefixMatch.lower`` from the holders of each of the first ``blocks`` blocks."""
    lower: defaultdict[int, list[int]] = defaultdict(lambda: [0] * len(CacheLevel))
    alive, current = 0, NO_HOLDERS
    for depth, holders in enumerate(found[:blocks]):
        if holders is current:
            continue
        staying = reach[min(depth, len(reach) - 1)]
        if current.lower or holders.lower:
            _change_holders(lower, depth, (current, alive), (holders, staying))
        alive, current = staying, holders
    if current.lower:
        _change_holders(lower, blocks, (current, alive), (NO_HOLDERS, 0))
    return lower


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

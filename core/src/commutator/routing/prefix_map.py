"""From a block's sequence hash to its holders, and the longest prefix of every holder at once.

Holders are numbered slots, kept as bit masks: one dictionary look-up serves all of them, and as
equal holder sets are one object, a block with the holders of the block before it costs an ``is``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from commutator.kv.medium import Tier
from commutator.routing.holders import NOBODY, Holders, HolderSets

__all__ = ["Ended", "PrefixMap", "slots_of"]

_FEW = 2  # an itemgetter of one key answers no tuple

Ended = tuple[int, int]
"""Slots, as a bit mask, and the length of their prefix in blocks."""


class PrefixMap:
    """The blocks that somebody holds. A block that nobody holds any more takes no memory."""

    def __init__(self) -> None:
        self._holders: dict[int, Holders] = {}
        self._sets = HolderSets()

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def distinct_sets(self) -> int:
        """How many different holder sets there are."""
        return len(self._sets)

    def holders(self, sequence_hash: int) -> Holders | None:
        return self._holders.get(sequence_hash)

    def add(self, slot: int, tier: Tier, hashes: Iterable[int]) -> list[int]:
        """``slot`` holds these blocks in ``tier``; returns those that it held there before."""
        bit = 1 << slot
        known = self._holders
        repeated: list[int] = []
        before: object = self  # stands for "no block yet", as None is a holder set too
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

    def remove(self, slot: int, tier: Tier, hashes: Iterable[int]) -> None:
        """``slot`` holds these blocks in ``tier`` no longer; it must have held each of them."""
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

        Slots with the same length come together; slots that hold nothing do not come at all. The
        second result has, for slots with blocks in lower tiers, how many of the prefix's blocks
        are best found in each tier below the device.
        """
        ended: list[Ended] = []
        lower: defaultdict[int, list[int]] = defaultdict(lambda: [0] * len(Tier))
        alive, current, depth = 0, NOBODY, 0
        for holders, blocks in self._runs(hashes):
            if holders is current:
                depth += blocks
                continue
            staying = alive & holders.all if depth else holders.all
            if gone := alive & ~staying:
                ended.append((gone, depth))
            if current.lower or holders.lower:
                _turn(lower, depth, (current, alive), (holders, staying))
            alive, current = staying, holders
            if not alive:
                break
            depth += blocks
        if alive:
            ended.append((alive, depth))
            if current.lower:
                _turn(lower, depth, (current, alive), (NOBODY, 0))
        return ended, lower

    def _runs(self, hashes: Sequence[int]) -> Iterator[tuple[Holders, int]]:
        """Stretches of blocks with the same holders, up to the first that nobody holds."""
        found = self._known_prefix(hashes)
        if not found:
            return
        current, begun = found[0], 0
        # Counting compares, which is slow for unequal sets; a last one that differs saves it.
        if found[-1] is not current or found.count(current) < len(found):
            for number, holders in enumerate(found):
                if holders is not current:
                    yield current, number - begun
                    current, begun = holders, number
        yield current, len(found) - begun

    def _known_prefix(self, hashes: Sequence[int]) -> tuple[Holders, ...]:
        """The holders of each block up to the first that nobody holds.

        An ``itemgetter`` looks up many at once, if all are there. Prompts lose their last blocks
        first, so that bisecting nearly always tells how many are; and never too few.
        """
        known = self._holders
        if hashes and hashes[-1] not in known:
            hashes = hashes[: bisect_left(hashes, True, key=lambda block: block not in known)]
        if len(hashes) < _FEW:
            return tuple(known[block] for block in hashes)
        found: tuple[Holders, ...]
        try:
            found = itemgetter(*hashes)(known)
        except KeyError:  # a block in the middle is gone
            found = tuple(iter(map(known.get, hashes).__next__, None))
        return found


def slots_of(mask: int) -> Iterator[int]:
    """The slots in a bit mask, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit


def _turn(
    lower: defaultdict[int, list[int]],
    depth: int,
    before: tuple[Holders, int],
    after: tuple[Holders, int],
) -> None:
    """Holders and slots still alive change at ``depth``.

    A stretch in a lower tier is counted as its end minus its start, so that only slots that enter
    or leave a tier cost anything.
    """
    for tier in (Tier.HOST, Tier.DISK, Tier.EXTERNAL):
        left = before[0].best[tier] & before[1]
        entered = after[0].best[tier] & after[1]
        changed = left ^ entered
        while changed:
            bit = changed & -changed
            lower[bit.bit_length() - 1][tier] += depth if left & bit else -depth
            changed ^= bit

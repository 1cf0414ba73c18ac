"""An index of loads, and the search for what costs least. Pure.

Ranks are bits of a mask, numbered as in the prefix index. For each field of ``WorkerLoad`` the
index knows which ranks have which value. A cost that never falls with the load and never rises with
the overlap has a lower bound for all ranks that the search has not seen: the cost of the least
remaining values and the longest remaining prefix. The search looks at the ranks that determine the
bound, and ends when it exceeds the least cost found. (Fagin, Lotem and Naor, "Optimal aggregation
algorithms for middleware", 2001, call this the threshold algorithm.) Rounding keeps the order of
floating-point results, so the bound also holds for the numbers that a look at each would compare.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable

from attrs import define, field, frozen

from commutator.contract.routing import Cost, Overlap, WorkerLoad, on_device
from commutator.routing.prefix_index.prefix_map import PrefixMatch

__all__ = [
    "Found",
    "LoadIndex",
]

_FEW = 8
"""So many ranks are looked at one by one: the bound would cost more than it can save."""
_NO_OVERLAP = Overlap()


@define(eq=False)
class _Values:
    """The ranks that have each value of one field."""

    ranks: dict[int, int] = field(factory=dict)
    """A bit mask by value."""
    order: list[int] = field(factory=list)
    """The values, sorted."""

    def enter(self, value: int, bit: int) -> None:
        known = self.ranks.get(value)
        if known is None:
            insort(self.order, value)
            self.ranks[value] = bit
        else:
            self.ranks[value] = known | bit

    def leave(self, value: int, bit: int) -> None:
        rest = self.ranks[value] & ~bit
        if rest:
            self.ranks[value] = rest
        else:
            del self.ranks[value]
            del self.order[bisect_left(self.order, value)]


@frozen
class Found:
    """The result of a search."""

    cost: float
    """The least cost."""
    ranks: int
    """All ranks that cost this, as a bit mask."""
    looked_at: list[tuple[float, int]]
    """Costs that were computed, each with the ranks that have it, as they were found."""
    others_cost: float
    """The ranks that are not in ``looked_at`` cost at least this; infinite if there are none."""


class LoadIndex:
    """Ranks by their loads. A rank is a number; sets of ranks are bit masks."""

    def __init__(self) -> None:
        self.loads: dict[int, WorkerLoad] = {}
        self._fields = (_Values(), _Values(), _Values())

    def put(self, rank: int, load: WorkerLoad) -> None:
        """Enter a rank, or change its load."""
        before = self.loads.get(rank)
        self.loads[rank] = load
        bit, now = 1 << rank, _values(load)
        if before is None:
            for values, value in zip(self._fields, now, strict=True):
                values.enter(value, bit)
            return
        for values, old, value in zip(self._fields, _values(before), now, strict=True):
            if old != value:
                values.leave(old, bit)
                values.enter(value, bit)

    def at_most_requests(self, limit: float, among: int) -> int:
        """The ranks of ``among`` with at most ``limit`` requests in flight."""
        requests = self._fields[0]
        if requests.order and requests.order[-1] <= limit:
            return among
        kept = 0
        for value in requests.order:
            if value > limit:
                break
            kept |= requests.ranks[value]
        return kept & among

    def fewest_requests(self, among: int) -> int:
        """The least number of requests in flight of any rank of ``among``, which is not empty."""
        requests = self._fields[0]
        return next(value for value in requests.order if requests.ranks[value] & among)

    def total_requests(self, among: int) -> int:
        """The sum of the requests in flight of the ranks of ``among``."""
        return sum(
            value * (ranks & among).bit_count() for value, ranks in self._fields[0].ranks.items()
        )

    def most(self, amount: Callable[[WorkerLoad], float], among: int) -> float:
        """The greatest ``amount`` of any rank of ``among``, which is not empty."""
        unseen, greatest = among, -math.inf
        places = [len(values.order) - 1 for values in self._fields]
        while unseen:
            corner: list[int] = []
            for number, values in enumerate(self._fields):
                while not values.ranks[values.order[places[number]]] & unseen:
                    places[number] -= 1
                corner.append(values.order[places[number]])
            if amount(_load(corner)) <= greatest:
                break
            for values, value in zip(self._fields, corner, strict=True):
                if ranks := values.ranks[value] & unseen:
                    load = self.loads[_first(ranks)]
                    unseen &= ~self.equal(load)
                    greatest = max(greatest, amount(load))
        return greatest

    def least(self, cost: Cost, match: PrefixMatch, among: int) -> Found:
        """The ranks of ``among``, which is not empty, that cost least."""
        search = _Search(self, cost, match, among)
        if among.bit_count() <= _FEW:
            while search.unseen:
                search.look(search.unseen)
        else:
            search.run(self._fields)
        return search.found()

    def equal(self, load: WorkerLoad) -> int:
        """The ranks with exactly this load."""
        requests, tokens, blocks = self._fields
        return (
            requests.ranks[load.active_requests]
            & tokens.ranks[load.active_prefill_tokens]
            & blocks.ranks[load.active_decode_blocks]
        )


class _Search:
    """One search for what costs least."""

    def __init__(self, index: LoadIndex, cost: Cost, match: PrefixMatch, among: int) -> None:
        self.unseen = among
        self._index = index
        self._cost = cost
        self._reach = match.reach
        self._match = match
        self._level = match.level(among)
        """Of the longest prefix that an unseen rank may have; -1: none has any."""
        self._best = math.inf
        self._tied = 0
        self._looked_at: list[tuple[float, int]] = []
        self._others = math.inf
        # Blocks in lower tiers may be worth more than on the device, so no bound covers them.
        for rank in match.lower:
            if self.unseen >> rank & 1:
                self.unseen ^= 1 << rank
                self._note(cost(index.loads[rank], match.overlap(rank)), 1 << rank)

    def run(self, fields: tuple[_Values, ...]) -> None:
        """Look at ranks until no other can cost as little as the best."""
        reach, places, turn = self._reach, [0] * len(fields), 0
        tables = [(number, values.order, values.ranks) for number, values in enumerate(fields)]
        floor, lightest = places.copy(), places.copy()
        while unseen := self.unseen:
            for number, order, ranks_of in tables:
                place = places[number]
                while not (ranks := ranks_of[order[place]] & unseen):
                    place += 1
                places[number], floor[number], lightest[number] = place, order[place], ranks
            if self._level >= 0 and not reach[self._level] & unseen:
                self._level = self._match.level(unseen, self._level)
            bound = self._cost(_load(floor), self._overlap(self._level))
            if bound > self._best:
                self._others = min(self._others, bound)
                return
            self.look(_lightest_of(lightest[turn], lightest))
            turn = (turn + 1) % len(fields)
            if self._level >= 0 and (ranks := reach[self._level] & self.unseen):
                self.look(_lightest_of(ranks, lightest))

    def look(self, ranks: int) -> None:
        """Compute the cost of one of ``ranks``, which are unseen, and of all with the same load."""
        load = self._index.loads[_first(ranks)]
        group = self._index.equal(load) & self.unseen
        self.unseen &= ~group
        level = self._level
        while group:
            if level >= 0 and not group & self._reach[level]:
                level = self._match.level(group, level)
            part = group if level < 0 else group & self._reach[level]
            cost = self._cost(load, self._overlap(level))
            self._note(cost, part)
            group ^= part
            if group and cost > self._best:  # the others hold less, so none costs less
                self._others = min(self._others, cost)
                return

    def found(self) -> Found:
        return Found(self._best, self._tied, self._looked_at, self._others)

    def _note(self, cost: float, ranks: int) -> None:
        self._looked_at.append((cost, ranks))
        if cost < self._best or not self._tied:
            self._best, self._tied = cost, ranks
        elif cost == self._best:
            self._tied |= ranks

    def _overlap(self, level: int) -> Overlap:
        return _NO_OVERLAP if level < 0 else on_device(self._match.depths[level])


def _values(load: WorkerLoad) -> tuple[int, int, int]:
    return load.active_requests, load.active_prefill_tokens, load.active_decode_blocks


def _load(values: list[int]) -> WorkerLoad:
    requests, tokens, blocks = values
    return WorkerLoad(
        active_requests=requests, active_prefill_tokens=tokens, active_decode_blocks=blocks
    )


def _lightest_of(ranks: int, lightest: list[int]) -> int:
    """Those of ``ranks`` that are among the lightest by as many fields as possible."""
    for light in lightest:
        ranks = ranks & light or ranks
    return ranks


def _first(ranks: int) -> int:
    """The lowest number in a bit mask that is not empty."""
    return (ranks & -ranks).bit_length() - 1

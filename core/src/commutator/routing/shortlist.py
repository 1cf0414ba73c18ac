"""Finds the candidates that cost least without a look at each of a thousand workers.

``LoadIndex`` holds the ranks by their loads, as bit masks numbered as in the prefix index: for each
field of ``WorkerLoad`` it knows which ranks have which value. A cost that never falls with the load
and never rises with the overlap has a lower bound for all ranks that a search has not seen: the
cost of the least remaining values and the longest remaining prefix. The search looks at the ranks
that determine the bound, and ends when it exceeds the least cost found. (Fagin, Lotem and Naor,
"Optimal aggregation algorithms for middleware", 2001, call this the threshold algorithm.) Rounding
keeps the order of floating-point results, so the bound also holds for the numbers that a look at
each would compare.

``RankTable`` keeps the index up to date between requests; ``IndexedPool`` gives it to policies.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from operator import itemgetter
from typing import overload

from attrs import define, field, frozen

from commutator.contract.routing import (
    BusyConfig,
    Candidate,
    CandidatePool,
    Cost,
    LeastCost,
    Overlap,
    WorkerLoad,
    on_device,
    ranks_of,
)
from commutator.routing.load import InFlightLoad, load_of, threshold_hit, values_of
from commutator.routing.prefix_index.index import PrefixIndex
from commutator.routing.prefix_index.prefix_map import NOTHING_HELD, PrefixMatch
from commutator.routing.workers import LiveWorker

_FEW = 8
"""So many ranks are looked at one by one: the bound would cost more than it can save."""


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
        bit, now = 1 << rank, values_of(load)
        if before is None:
            for values, value in zip(self._fields, now, strict=True):
                values.enter(value, bit)
            return
        for values, old, value in zip(self._fields, values_of(before), now, strict=True):
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
            if amount(load_of(*corner)) <= greatest:
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
            for number, order, by_value in tables:
                place = places[number]
                while not (ranks := by_value[order[place]] & unseen):
                    place += 1
                places[number], floor[number], lightest[number] = place, order[place], ranks
            if self._level >= 0 and not reach[self._level] & unseen:
                self._level = self._match.level(unseen, self._level)
            bound = self._cost(load_of(*floor), self._overlap(self._level))
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
        return _NOTHING if level < 0 else on_device(self._match.depths[level])


def _lightest_of(ranks: int, lightest: list[int]) -> int:
    """Those of ``ranks`` that are among the lightest by as many fields as possible."""
    for light in lightest:
        ranks = ranks & light or ranks
    return ranks


def _first(ranks: int) -> int:
    """The lowest number in a bit mask that is not empty."""
    return (ranks & -ranks).bit_length() - 1


_COMPARED = 4
"""Candidates that a decision is explained with."""
_CHUNK = 64
_NOTHING = Overlap()


class RankTable:
    """Every data-parallel rank of some workers, in order, and their loads."""

    def __init__(
        self,
        workers: Sequence[LiveWorker],
        load: InFlightLoad,
        index: PrefixIndex | None,
        block_size: int,
        busy: BusyConfig | None = None,
    ) -> None:
        """``workers`` must not change. ``busy`` says which ranks are busy; None: none ever is.

        ``index`` is None when overlaps are not looked up. ``block_size`` is that of the loads.
        """
        self.workers = workers
        self._load = load
        self._index = index
        self._layout = 0 if index is None else index.layout
        self._busy = busy
        self.members: list[tuple[LiveWorker, int]] = []
        """Each worker with the number of one of its data-parallel ranks."""
        self.numbers: list[int] = []
        """The bit of each member in masks."""
        self._names: list[str] = []
        self._position: dict[str, int] = {}
        self._capacity: list[int] = []
        for worker in workers:
            info = worker.record.info
            capacity = info.rank_capacity_blocks(block_size)
            for owner, name in ranks_of(worker.record.worker_id, info.data_parallel_size):
                position = len(self.members)
                self._position[name] = position
                self._names.append(name)
                self._capacity.append(capacity)
                self.members.append((worker, owner.rank))
                self.numbers.append(position if index is None else index.slot_of(owner))
        self._at = dict(zip(self.numbers, range(len(self.numbers)), strict=True))
        self._chunks = [
            _mask(self.numbers[begin : begin + _CHUNK])
            for begin in range(0, len(self.numbers), _CHUNK)
        ]
        self.everyone = _mask(self.numbers)
        """All ranks, as a bit mask."""
        self._known: list[Candidate | None] = [None] * len(self.members)
        """The last candidate of each member: most are the same for the next request."""
        self._loads = LoadIndex()
        self._synchronized = -1
        self._hits: dict[int, str] = {}
        """The threshold that each busy rank has reached."""
        self._counts: Counter[str] = Counter()
        """The number of busy ranks by threshold."""
        self._busy_ranks = 0

    def serves(self, workers: Sequence[LiveWorker], busy: BusyConfig | None) -> bool:
        """Whether it is the table of exactly these workers, as they are now."""
        layout = 0 if self._index is None else self._index.layout
        return workers is self.workers and busy is self._busy and layout == self._layout

    def loads(self) -> LoadIndex:
        """The loads of now."""
        self._synchronize()
        return self._loads

    def free(self) -> int:
        """The ranks that are not busy, as a bit mask."""
        if self._busy is None:
            return self.everyone
        self._synchronize()
        return self.everyone & ~self._busy_ranks

    def hits(self) -> Counter[str]:
        """The number of busy ranks by the threshold that they have reached."""
        if self._busy is not None:
            self._synchronize()
        return +self._counts

    def find(self, name: str, among: int) -> int | None:
        """The position of the member with this ``Candidate.worker_id``, if it is in ``among``."""
        position = self._position.get(name)
        if position is None or not among >> self.numbers[position] & 1:
            return None
        return position

    def first(self, among: int) -> int:
        """The position of one member of ``among``, which is not empty."""
        return self._at[(among & -among).bit_length() - 1]

    def nth(self, among: int, place: int) -> int:
        """The position of the member of ``among`` that has this place in the order, from 0."""
        if among == self.everyone:
            return range(len(self.numbers))[place]
        if place < 0:
            place += among.bit_count()
        if place == 0 and among and not among & (among - 1):
            return self.first(among)
        begin = 0
        for chunk in self._chunks if place >= 0 else ():
            found = among & chunk
            if place < (count := found.bit_count()):
                numbers = self.numbers[begin : begin + _CHUNK]
                places = compress(range(begin, begin + _CHUNK), (found >> n & 1 for n in numbers))
                return list(places)[place]
            place -= count
            begin += _CHUNK
        raise IndexError("there are fewer candidates")

    def positions(self, among: int) -> Iterable[int]:
        """The positions of all members of ``among``, in order."""
        everyone = range(len(self.numbers))
        if among == self.everyone:
            return everyone
        return compress(everyone, (among >> number & 1 for number in self.numbers))

    def candidate(self, position: int, overlap: Overlap) -> Candidate:
        """The member with its load of now."""
        load, known = self._load.of(self._names[position]), self._known[position]
        record = self.members[position][0].record
        if (
            known is None
            or known.load is not load
            or known.overlap is not overlap
            or known.worker is not record
        ):
            rank = self.members[position][1]
            known = Candidate(worker=record, load=load, overlap=overlap, rank=rank)
            self._known[position] = known
        return known

    def _synchronize(self) -> None:
        if self._synchronized == self._load.changes:
            return
        names: Iterable[str] | None = None
        if self._synchronized >= 0:
            names = self._load.changed_since(self._synchronized)
        for name in self._names if names is None else names:
            if (position := self._position.get(name)) is not None:
                self._update(position, self._load.of(name))
        self._synchronized = self._load.changes

    def _update(self, position: int, load: WorkerLoad) -> None:
        number = self.numbers[position]
        self._loads.put(number, load)
        if self._busy is None:
            return
        before = self._hits.pop(number, None)
        if before is not None:
            self._counts[before] -= 1
            self._busy_ranks ^= 1 << number
        hit = threshold_hit(self._busy, load, self._capacity[position])
        if hit is not None:
            self._hits[number] = hit
            self._counts[hit] += 1
            self._busy_ranks |= 1 << number


class IndexedPool(CandidatePool):
    """Members of a table as the candidates for one prompt."""

    def __init__(
        self,
        table: RankTable,
        match: PrefixMatch = NOTHING_HELD,
        among: int | None = None,
        made: dict[int, Candidate] | None = None,
    ) -> None:
        """``among``: the ranks that are candidates, as a bit mask; None: all of the table.

        ``made`` collects every candidate that is looked at, by its position in the table.
        """
        self.among = table.everyone if among is None else among
        self.made: dict[int, Candidate] = {} if made is None else made
        self._table = table
        self._match = match
        self._length = self.among.bit_count()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Candidate]:
        table, made, overlaps = self._table, self.made, self._match.overlaps()
        for position in table.positions(self.among):
            overlap = overlaps.get(table.numbers[position], _NOTHING)
            candidate = made[position] = table.candidate(position, overlap)
            yield candidate

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [self[number] for number in range(self._length)[index]]
        return self.at(self._table.nth(self.among, index))

    def at(self, position: int) -> Candidate:
        """The candidate at this position of the table."""
        if (known := self.made.get(position)) is not None:
            return known
        table = self._table
        overlap = self._match.overlap(table.numbers[position])
        candidate = self.made[position] = table.candidate(position, overlap)
        return candidate

    @property
    def fewest_requests(self) -> int:
        return self._searched().fewest_requests(self.among)

    @property
    def total_requests(self) -> int:
        return self._table.loads().total_requests(self.among)

    def at_most_requests(self, limit: float) -> IndexedPool:
        kept = self._table.loads().at_most_requests(limit, self.among)
        return self if kept == self.among else self._part(kept)

    def least(self, cost: Cost) -> LeastCost:
        found = self._searched().least(cost, self._match, self.among)
        looked_at = sorted(found.looked_at, key=itemgetter(0))
        others = found.others_cost
        positions: list[int] = []
        for its, ranks in looked_at[:_COMPARED]:
            positions.append(self._table.first(ranks))
            if ranks & (ranks - 1):
                others = min(others, its)
        if len(looked_at) > _COMPARED:
            others = min(others, looked_at[_COMPARED][0])
        return LeastCost(
            cost=found.cost,
            candidates=self._part(found.ranks),
            compared=[self.at(position) for position in sorted(positions)],
            others_cost=others if self._length > len(positions) else math.inf,
        )

    def most(self, amount: Callable[[WorkerLoad], float]) -> float:
        return self._searched().most(amount, self.among)

    def _part(self, among: int) -> IndexedPool:
        return IndexedPool(self._table, self._match, among, self.made)

    def _searched(self) -> LoadIndex:
        if not self._length:
            raise ValueError("there is no candidate")
        return self._table.loads()


def _mask(numbers: Iterable[int]) -> int:
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask

"""The ranks of a model's workers as a ``CandidatePool``, kept up to date between requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from operator import itemgetter
from typing import overload

from commutator.contract.routing import (
    BusyConfig,
    Candidate,
    CandidatePool,
    Cost,
    LeastCost,
    Overlap,
    WorkerLoad,
    ranks_of,
)
from commutator.routing.load import InFlightLoad, threshold_hit
from commutator.routing.prefix_index.index import PrefixIndex
from commutator.routing.prefix_index.prefix_map import NOTHING_HELD, PrefixMatch
from commutator.routing.shortlist.load_index import LoadIndex
from commutator.routing.workers import LiveWorker

__all__ = [
    "IndexedPool",
    "RankTable",
]

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

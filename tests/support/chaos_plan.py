"""A plan of random faults, from a seed. Pure.

Kinds are dealt like cards, so that a long run has each about equally often. Two faults overlap only
if one befalls what all hosts share, etcd or NATS, and the other one a host of the cluster.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from enum import StrEnum

from attrs import evolve, frozen

__all__ = ["CLOCK_JUMP_S", "Fault", "Kind", "Places", "plan"]

CLOCK_JUMP_S = 3600
"""A clock jumps to at most that long before or after the right time."""
_OVERLAPPING = 0.25
"""The part of faults that begin before the one before has ended, if they may."""
_FIRST_S = 5.0
_KILLS_ALL_UNTIL = 0.2


class Kind(StrEnum):
    """What befalls a place. Where two places are named, the second one is ``Fault.other``."""

    WORKER_KILLED = "a worker is killed"
    DOOR_KILLED = "a front door is killed"
    HOST_VANISHED = "the host is killed, no packet comes"
    HOST_KILLED = "the host is killed, connections are reset"
    HOST_PAUSED_BRIEFLY = "the host is paused, for less than pings allow"
    HOST_PAUSED = "the host is paused"
    CUT_FROM_ETCD = "the host is cut off from etcd"
    COMPACTED_UNSEEN = "etcd is compacted, while the host is cut off from it"
    CUT_FROM_DOOR = "the host is cut off from one front door"
    CUT_FROM_ALL = "the host is cut off from all"
    BAD_LINK = "the host loses 5 % of packets, others take 40 ms more"
    CLOCK_JUMPED = "the host's clock jumps"
    ETCD_MEMBER_KILLED = "a member of etcd is killed"
    ETCD_MEMBER_PAUSED = "a member of etcd is paused"
    ETCD_LEADER_KILLED = "etcd's leader is killed"
    ETCD_WITHOUT_QUORUM = "two of three members of etcd are killed"
    ETCD_BAD_LINK = "a member of etcd loses 5 % of packets, others take 40 ms more"
    NATS_KILLED = "NATS is killed"
    NATS_PAUSED = "NATS is paused"
    NATS_CUT_OFF = "NATS is cut off from all"


_SHARED = frozenset(kind for kind in Kind if kind.name.startswith(("ETCD_", "NATS_")))
"""They befall what is not on a host of the cluster."""
_LASTS_S: dict[Kind, tuple[float, float]] = {
    Kind.WORKER_KILLED: (0.0, 0.0),
    Kind.DOOR_KILLED: (0.0, 0.0),
    Kind.HOST_VANISHED: (4.0, 12.0),
    Kind.HOST_KILLED: (1.0, 8.0),
    Kind.HOST_PAUSED_BRIEFLY: (1.5, 2.5),
    Kind.HOST_PAUSED: (5.0, 30.0),
    Kind.CUT_FROM_ETCD: (3.0, 20.0),
    Kind.COMPACTED_UNSEEN: (3.0, 10.0),
    Kind.CUT_FROM_DOOR: (4.0, 15.0),
    Kind.CUT_FROM_ALL: (3.0, 8.0),  # a front door alone has streams that wait, at most 10 s
    Kind.BAD_LINK: (8.0, 20.0),
    Kind.CLOCK_JUMPED: (0.0, 0.0),
    Kind.ETCD_MEMBER_KILLED: (2.0, 10.0),
    Kind.ETCD_MEMBER_PAUSED: (2.0, 15.0),
    Kind.ETCD_LEADER_KILLED: (2.0, 10.0),
    Kind.ETCD_WITHOUT_QUORUM: (5.0, 60.0),
    Kind.ETCD_BAD_LINK: (8.0, 20.0),
    Kind.NATS_KILLED: (1.0, 10.0),
    Kind.NATS_PAUSED: (1.0, 15.0),
    Kind.NATS_CUT_OFF: (3.0, 15.0),
}


@frozen(kw_only=True)
class Places:
    """Names of hosts."""

    doors: Sequence[str]
    """Hosts with a front door."""
    workers: Sequence[str]
    """Hosts with workers; they may have a front door, too."""
    etcd: Sequence[str]
    nats: Sequence[str] = ()
    spared: str = ""
    """This host and its front door are killed in the first fifth of the time only, so that their
    processes grow old."""

    @property
    def cluster(self) -> Sequence[str]:
        """Hosts with front doors or workers."""
        return list(dict.fromkeys((*self.doors, *self.workers)))


@frozen(kw_only=True)
class Fault:
    """What befalls where and when. Times are seconds, from the beginning of the run."""

    at_s: float
    kind: Kind
    place: str
    """The name of a host; "" for a member or server that is found when it is needed."""
    other: str = ""
    lasts_s: float = 0.0
    offset_s: int = 0
    """How far ahead a clock is afterwards."""

    @property
    def ends_s(self) -> float:
        return self.at_s + self.lasts_s

    @property
    def is_shared(self) -> bool:
        """It befalls etcd or NATS, not a host of the cluster."""
        return self.kind in _SHARED

    def __str__(self) -> str:
        place = f"{self.place}: " if self.place else ""
        other = f" ({self.other})" if self.other else ""
        clock = f", by {self.offset_s:+d} s" if self.kind is Kind.CLOCK_JUMPED else ""
        lasts = f", for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{place}{self.kind}{other}{clock}{lasts}"


def plan(
    seed: int, length_s: float, places: Places, rest_s: tuple[float, float]
) -> Sequence[Fault]:
    """Faults in the order of their beginning, all of which end within ``length_s``.

    Between the end of all and the next one, a time within ``rest_s`` passes. Raises ValueError
    unless there are two front doors and two hosts with workers, or the rest is no range.
    """
    if min(len(places.doors), len(places.workers)) < 2:
        raise ValueError("a fault of one front door or of one host needs another one that serves")
    if not 0 <= rest_s[0] <= rest_s[1]:
        raise ValueError(f"rest_s: expected two times of which the first is not longer: {rest_s}")
    chance = random.Random(seed)
    kinds = [kind for kind in Kind if places.nats or not kind.name.startswith("NATS_")]
    faults: list[Fault] = []
    begins_s = _FIRST_S
    overlapped: Fault | None = None
    """The fault that the next one may overlap."""
    for kind in _dealt(kinds, chance):
        fault = _fault(kind, places, begins_s, length_s, chance)
        overlaps = (
            overlapped is not None
            and overlapped.lasts_s > 0
            and _may_overlap(overlapped, fault)
            and chance.random() < _OVERLAPPING
        )
        if overlaps and overlapped is not None:
            fault = evolve(fault, at_s=chance.uniform(overlapped.at_s, overlapped.ends_s))
        if fault.ends_s > length_s:
            break
        faults.append(fault)
        overlapped = None if overlaps else fault
        begins_s = max(one.ends_s for one in faults[-2:]) + chance.uniform(*rest_s)
    return faults


def _may_overlap(one: Fault, other: Fault) -> bool:
    kinds = {one.kind, other.kind}
    if Kind.COMPACTED_UNSEEN in kinds:  # etcd must answer then
        return any(kind.name.startswith("NATS_") for kind in kinds)
    return one.is_shared != other.is_shared


def _dealt(kinds: Sequence[Kind], chance: random.Random) -> Iterator[Kind]:
    """One shuffled deck after the other."""
    while True:
        yield from chance.sample(kinds, len(kinds))


def _fault(
    kind: Kind, places: Places, at_s: float, length_s: float, chance: random.Random
) -> Fault:
    place, other, offset_s = "", "", 0
    spared = () if at_s < length_s * _KILLS_ALL_UNTIL else (places.spared,)
    match kind:
        case Kind.WORKER_KILLED:
            place = chance.choice(places.workers)
        case Kind.DOOR_KILLED:
            place = chance.choice([one for one in places.doors if one not in spared])
        case Kind.HOST_VANISHED | Kind.HOST_KILLED:
            place = chance.choice([one for one in places.cluster if one not in spared])
        case Kind.CUT_FROM_DOOR:
            place = chance.choice(places.workers)
            other = chance.choice([door for door in places.doors if door != place])
        case Kind.ETCD_MEMBER_KILLED | Kind.ETCD_MEMBER_PAUSED | Kind.ETCD_BAD_LINK:
            place = chance.choice(places.etcd)
        case Kind.ETCD_WITHOUT_QUORUM:
            place, other = chance.sample(places.etcd, 2)
        case Kind.ETCD_LEADER_KILLED:
            pass  # which member leads is known only then
        case Kind.NATS_KILLED | Kind.NATS_PAUSED | Kind.NATS_CUT_OFF:
            place = chance.choice(places.nats)
        case _:
            place = chance.choice(places.cluster)
    if kind is Kind.CLOCK_JUMPED:
        offset_s = chance.randint(-CLOCK_JUMP_S, CLOCK_JUMP_S)
    lasts_s = round(chance.uniform(*_LASTS_S[kind]), 1)
    return Fault(at_s=at_s, kind=kind, place=place, other=other, lasts_s=lasts_s, offset_s=offset_s)

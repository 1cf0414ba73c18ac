"""Keeps a session on one worker: consistent hashing with bounded load."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import Annotated

from attrs import frozen

from commutator import (
    Bounds,
    Candidate,
    Decision,
    PositiveInt,
    RouterConfig,
    RouteRequest,
    RouterRegister,
    RoutingPolicy,
    hookimpl,
    setting,
)

__all__ = ["HashRing", "SessionAffinity", "SessionAffinityConfig"]

_REMEMBERED = 1024


@frozen(kw_only=True)
class SessionAffinityConfig(RouterConfig):
    """How evenly sessions are spread, and how far a worker may be above the mean."""

    load_factor: Annotated[float, Bounds(above=1)] = setting(
        "A worker takes at most this many times the mean number of requests in flight; beyond it, "
        "a session goes to the next worker on the ring.",
        1.25,
        tunable=(1.05, 4),
    )
    points: PositiveInt = setting("Points of each worker on the hash ring.", 64)


class SessionAffinity(RoutingPolicy):
    """A session's hash meets the ring at one worker, and stays there while workers come and go.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016). A request without
    a session is routed by its own id, which spreads evenly.
    """

    def __init__(self, config: SessionAffinityConfig) -> None:
        self._config = config
        self._ring = HashRing(config.points)

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        loads = {c.worker_id: c.load.active_requests for c in candidates}
        self._ring.add(loads.keys())
        limit = math.ceil(self._config.load_factor * (sum(loads.values()) + 1) / len(loads))
        home, chosen = self._walk(request.session_id or request.request_id, loads, limit)
        what = f'session "{request.session_id}"' if request.session_id else "no session"
        return Decision(
            worker_id=chosen,
            policy="session_affinity",
            reason=f"{what}: {_where(home, chosen, loads)} "
            f"({loads[chosen]} of at most {limit} requests)",
            scores={worker_id: {"requests": load} for worker_id, load in loads.items()},
        )

    def forget(self, worker_id: str) -> None:
        self._ring.drop(lambda known: known == worker_id or known.startswith(f"{worker_id}@"))

    def _walk(self, key: str, loads: Mapping[str, int], limit: int) -> tuple[str, str]:
        """The session's own worker, and the first from there on that may take the request."""
        home = next(self._ring.walk(key))
        there = (worker_id for worker_id in self._ring.walk(key) if worker_id in loads)
        nearest = next(there)
        below = (worker_id for worker_id in chain((nearest,), there) if loads[worker_id] < limit)
        return home, next(below, nearest)


def _where(home: str, chosen: str, loads: Mapping[str, int]) -> str:
    if chosen == home:
        return "its worker"
    why = "is at its limit" if home in loads else "is no candidate now (busy or unreachable)"
    return f"next after {home}, which {why}"


class HashRing:
    """A consistent-hash ring: the points of every known worker, until it is dropped.

    A worker that is not a candidate for a while keeps its points, and the caller passes over them.
    That gives the order of a ring without it, and the ring need not be rebuilt when it is back.
    """

    def __init__(self, points: int) -> None:
        """``points``: points of each worker."""
        self._points = points
        self._workers: set[str] = set()
        self._ring: list[tuple[int, str]] = []

    def add(self, workers: Collection[str]) -> None:
        """Add workers. If very many are known by then, the others are forgotten."""
        new = [worker_id for worker_id in workers if worker_id not in self._workers]
        if not new:
            return
        if len(self._workers) + len(new) > max(_REMEMBERED, 2 * len(workers)):
            self.drop(lambda worker_id: worker_id not in workers)
        self._workers.update(new)
        for worker_id in new:
            self._ring += ((point, worker_id) for point in _points_of(worker_id, self._points))
        self._ring.sort()

    def drop(self, is_gone: Callable[[str], bool]) -> None:
        """Drop workers that do not come back."""
        gone = {worker_id for worker_id in self._workers if is_gone(worker_id)}
        if gone:
            self._workers -= gone
            self._ring = [point for point in self._ring if point[1] not in gone]

    def walk(self, key: str) -> Iterator[str]:
        """The worker of each point, once around the ring from the key's point."""
        start = bisect.bisect(self._ring, (_point(key), ""))
        for number in range(start - len(self._ring), start):
            yield self._ring[number][1]


@lru_cache(_REMEMBERED)
def _points_of(worker_id: str, count: int) -> tuple[int, ...]:
    return tuple(_point(f"{worker_id}#{number}") for number in range(count))


def _point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@hookimpl
def router_register(register: RouterRegister) -> None:
    register("session_affinity", SessionAffinityConfig, SessionAffinity, stability="beta")

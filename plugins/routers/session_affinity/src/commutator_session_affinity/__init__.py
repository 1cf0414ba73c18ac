"""Keeps a session on one worker: consistent hashing with bounded load."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated

from attrs import frozen

from commutator import (
    Candidate,
    Decision,
    RouterConfig,
    RouteRequest,
    RouterRegister,
    RoutingPolicy,
    hookimpl,
    setting,
)
from commutator.schema import Bounds, PositiveInt

__all__ = ["SessionAffinity", "SessionAffinityConfig"]


@frozen(kw_only=True)
class SessionAffinityConfig(RouterConfig):
    """How evenly sessions are spread, and how far a worker may be above the mean."""

    load_factor: Annotated[float, Bounds(above=1)] = setting(
        "A worker takes at most this many times the mean number of requests in flight; beyond it, "
        "a session goes to the next worker on the ring.",
        1.25,
    )
    points: PositiveInt = setting("Places of each worker on the hash ring.", 64)


class SessionAffinity(RoutingPolicy):
    """A session's hash meets the ring at one worker, and stays there while workers come and go.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016). A request without
    a session is routed by its own id, which spreads evenly.
    """

    def __init__(self, config: SessionAffinityConfig) -> None:
        self._config = config
        self._workers: tuple[str, ...] = ()
        self._ring: list[tuple[int, str]] = []

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        self._place(tuple(c.worker_id for c in candidates))
        loads = {c.worker_id: c.load.active_requests for c in candidates}
        limit = math.ceil(self._config.load_factor * (sum(loads.values()) + 1) / len(loads))
        key = request.session_id or request.request_id
        home, chosen = self._walk(key, loads, limit)
        what = f'session "{request.session_id}"' if request.session_id else "no session"
        where = "its worker" if chosen == home else f"next after {home}, which is at its limit"
        return Decision(
            worker_id=chosen,
            policy="session_affinity",
            reason=f"{what}: {where} ({loads[chosen]} of at most {limit} requests)",
            scores={worker_id: {"requests": load} for worker_id, load in loads.items()},
        )

    def _walk(self, key: str, loads: dict[str, int], limit: int) -> tuple[str, str]:
        """The session's own worker, and the first from there on that is below the limit."""
        start = bisect.bisect(self._ring, (_point(key), ""))
        order = [self._ring[(start + i) % len(self._ring)][1] for i in range(len(self._ring))]
        free = (worker_id for worker_id in order if loads[worker_id] < limit)
        return order[0], next(free, order[0])

    def _place(self, workers: tuple[str, ...]) -> None:
        if workers != self._workers:
            self._workers = workers
            self._ring = sorted(
                (_point(f"{worker_id}#{i}"), worker_id)
                for worker_id in workers
                for i in range(self._config.points)
            )


def _point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@hookimpl
def router_register(register: RouterRegister) -> None:
    register("session_affinity", SessionAffinityConfig, SessionAffinity, stability="beta")

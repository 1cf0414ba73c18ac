"""What the live view shows: rates from counters, and the state of a run from its parts. Pure.

A tree of counters is a number, a list of trees or a dict of them, as JSON has them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

from attrs import define, field, frozen

from commutator.contract.routing import Decision
from commutator.contract.tier import UNBOUNDED
from commutator.contract.worker import EngineLoad, KvStatistics
from commutator.metrics.families import ITL_BUCKETS_S, TTFT_BUCKETS_S
from commutator.registry.unready import UnreadyWorker
from commutator.routing.workers import WorkerStatus

DEVICE = "device"
"""The name of an engine's own KV memory beside those of tiers."""

_SAME_S = 2.0
"""Front doors hear of a change within this time of each other."""

Counters = Any
"""A tree of counters."""


def plus(one: Counters, other: Counters) -> Counters:
    """The sum of two trees. A part that only one of them has counts as it is."""
    return _combined(one, other, 1.0)


def minus(one: Counters, other: Counters) -> Counters:
    """What was counted between ``other`` and the later ``one``; never less than 0."""
    return _combined(one, other, -1.0)


def _combined(one: Counters, other: Counters, sign: float) -> Counters:
    if isinstance(one, dict) and isinstance(other, dict):
        found = {
            key: _combined(part, other[key], sign) if key in other else part
            for key, part in one.items()
        }
        if sign > 0:
            found |= {key: part for key, part in other.items() if key not in one}
        return found
    if isinstance(one, list) and isinstance(other, list):
        return [_combined(a, b, sign) for a, b in zip(one, other, strict=True)]
    return max(0.0, one + sign * other)


_Counted = Mapping[str, tuple[str, Counters]]
"""(instance, tree) by the name of who counts."""


class RateWindow:
    """What several sources counted within the last seconds.

    A source is a process that counts from its start on; ``instance`` tells one start from the next.
    """

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._taken: deque[tuple[float, _Counted]] = deque()
        """The times and counters of the window."""

    def add(self, now_s: float, counters: _Counted) -> None:
        """The counters of ``now_s``, which never goes back."""
        self._taken.append((now_s, counters))
        while len(self._taken) > 2 and self._taken[1][0] <= now_s - self.length_s:  # noqa: PLR2004
            self._taken.popleft()

    def clear(self) -> None:
        self._taken.clear()

    @property
    def elapsed_s(self) -> float:
        """Between the oldest and the newest counters; 0 before there are two."""
        return self._taken[-1][0] - self._taken[0][0] if self._taken else 0.0

    def by_source(self) -> dict[str, Counters]:
        """What each source has counted since it was first seen in the window."""
        if not self._taken:
            return {}
        found = {}
        for source, (instance, counters) in self._taken[-1][1].items():
            first = next(
                taken[source][1]
                for _, taken in self._taken
                if source in taken and taken[source][0] == instance
            )
            found[source] = minus(counters, first)
        return found

    def total(self) -> Counters:
        """The sum of ``by_source``."""
        total: Counters = {}
        for counted in self.by_source().values():
            total = plus(total, counted)
        return total


def latency(counted: Mapping[str, Any], bounds_s: Sequence[float]) -> dict[str, Any]:
    """Mean, median and 95th percentile of what a histogram counted; None where it counted nothing.

    ``counted`` has ``counts``, by bucket, and ``sum_s``. Percentiles are interpolated within a
    bucket; beyond the last bound they are that bound.
    """
    counts: Sequence[float] = counted.get("counts", [])
    total = sum(counts)
    if not total:
        return {"count": 0, "mean_s": None, "p50_s": None, "p95_s": None}
    return {
        "count": int(total),
        "mean_s": counted["sum_s"] / total,
        "p50_s": _quantile(counts, bounds_s, 0.5),
        "p95_s": _quantile(counts, bounds_s, 0.95),
    }


def _quantile(counts: Sequence[float], bounds: Sequence[float], part: float) -> float:
    below = list(accumulate(counts))
    wanted = part * below[-1]
    bucket = bisect_left(below, wanted)
    if bucket >= len(bounds):
        return float(bounds[-1])
    start = 0.0 if bucket == 0 else float(bounds[bucket - 1])
    before = 0.0 if bucket == 0 else below[bucket - 1]
    return start + (bounds[bucket] - start) * (wanted - before) / counts[bucket]


@define(kw_only=True)
class RequestRow:
    """A request and the decision where it goes; completed while it is served."""

    request_id: str
    time_unix_s: float
    """When it was routed."""
    model: str
    principal: str | None
    prompt_tokens: int
    worker_id: str
    policy: str
    reason: str
    """Why the policy chose this worker, for people."""
    state: str = "running"
    """ "running", "done" or "failed"."""
    ttft_s: float | None = None
    duration_s: float | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the worker had in its KV cache; None until it is known."""
    generated_tokens: int | None = None
    """None until the end."""
    prefill_worker: str | None = None
    """The worker that computed the prompt and handed its KV over."""
    disaggregation: str | None = None
    """Where the prompt was to be prefilled, and why, for people; None without prefill workers."""
    migrated_from: list[str] = field(factory=list)
    """Workers that were lost while they served it."""
    error: str | None = None


@frozen(kw_only=True)
class Event:
    """Something that happens seldom, for people."""

    time_unix_s: float
    kind: str
    """ "worker up", "worker down", "migration", "drain" or "role"."""
    text: str


def changes(
    before: Mapping[str, tuple[str, str]], now: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Kind and text of drains and changes of roles; (state, role) by worker, before and now."""
    for worker_id, (state, role) in now.items():
        state_before, role_before = before.get(worker_id, (state, role))
        if role != role_before:
            yield "role", f"{worker_id} is {role} now, and was {role_before}"
        if state == "draining" and state_before != "draining":
            yield "drain", f"{worker_id} gets no new requests, and finishes those it has"


@frozen(kw_only=True)
class DecisionRow:
    """Why a request went where it went: the candidates that the policy compared."""

    request_id: str
    worker_id: str
    policy: str
    reason: str
    scores: dict[str, dict[str, float]]
    """The terms by candidate, the chosen one first, then by the first term."""
    left_out: int
    """Candidates that are not in ``scores``."""


def decision_row(request_id: str, decision: Decision, most: int) -> DecisionRow:
    """At most ``most`` candidates of a decision."""

    def order(one: tuple[str, Mapping[str, float]]) -> tuple[bool, float, str]:
        worker_id, terms = one
        return worker_id != decision.worker_id, next(iter(terms.values()), 0.0), worker_id

    shown = sorted(decision.scores.items(), key=order)[:most]
    return DecisionRow(
        request_id=request_id,
        worker_id=decision.worker_id,
        policy=decision.policy,
        reason=decision.reason,
        scores={worker_id: dict(terms) for worker_id, terms in shown},
        left_out=len(decision.scores) - len(shown) + decision.not_scored,
    )


@frozen(kw_only=True)
class DoorPart:
    """What one front-door process knows alone."""

    door: str
    """Its name, such as frontend-0."""
    instance: str
    """Another one after each start."""
    draining: bool
    running: int
    queued: int
    waiting: int
    """Requests that wait for a worker."""
    in_flight: dict[str, int]
    """Requests in flight, by worker; without workers that have none."""
    totals: Any
    """A tree of counters since start: ``FrontendMetrics.totals``, ``routed`` and ``handovers``."""
    recent: list[RequestRow]
    """The last requests, oldest first."""
    events: list[Event]
    """Oldest first."""


def door_totals(parts: Iterable[DoorPart]) -> dict[str, tuple[str, Counters]]:
    """For a ``RateWindow``."""
    return {part.door: (part.instance, part.totals) for part in parts}


def kv_totals(statistics: Mapping[str, KvStatistics]) -> dict[str, tuple[str, Counters]]:
    """The tier counters of each worker, for a ``RateWindow``; blocks by source and target."""
    found: dict[str, tuple[str, Counters]] = {}
    for worker_id, counted in statistics.items():
        moved: dict[str, dict[str, float]] = {}
        for tier in counted.tiers:
            moved.setdefault(tier.name, {})[DEVICE] = tier.loads.get("loaded", 0)
        for edge in counted.edges:
            moved.setdefault(edge.source, {})[edge.target] = edge.stored
        found[worker_id] = ("", moved)
    return found


def _rate(count: float, elapsed_s: float) -> float | None:
    return count / elapsed_s if elapsed_s else None


def requests(counted: Counters, elapsed_s: float, parts: Sequence[DoorPart]) -> dict[str, Any]:
    """Requests now and by second; rates are None before there is a second look."""
    endings: Mapping[str, float] = counted.get("requests", {})
    counts = {name: endings.get(name, 0) for name in ("refused", "failed")} | {
        name: counted.get(name, 0)
        for name in ("routed", "prompt_tokens", "cached_tokens", "output_tokens", "migrations")
    }
    return {
        "running": sum(part.running for part in parts),
        "queued": sum(part.queued for part in parts),
        "waiting": sum(part.waiting for part in parts),
        "per_s": _rate(sum(endings.values()), elapsed_s),
        **{f"{name}_per_s": _rate(count, elapsed_s) for name, count in counts.items()},
        "ttft": latency(counted.get("ttft", {}), TTFT_BUCKETS_S),
        "itl": latency(counted.get("itl", {}), ITL_BUCKETS_S),
    }


def cache_hits(
    counted: Counters, moved: Mapping[str, Counters], block_sizes: Mapping[str, int]
) -> dict[str, Any]:
    """The fraction of prompt tokens found in a cache, by where they were; None without prompts.

    ``counted`` is of the front doors, ``moved`` of the workers' tiers, both of the same window.
    The device's part is what tiers did not load. Workers are asked about their tiers every other
    second, so the parts are about right while load changes.
    """
    prompt, cached = counted.get("prompt_tokens", 0), counted.get("cached_tokens", 0)
    loaded: dict[str, float] = {}
    for worker_id, edges in moved.items():
        for source, targets in edges.items():
            if source != DEVICE:
                tokens = targets.get(DEVICE, 0) * block_sizes.get(worker_id, 0)
                loaded[source] = loaded.get(source, 0.0) + tokens
    from_tiers = sum(loaded.values())
    if from_tiers > cached:  # of requests that have not ended yet
        loaded = {name: tokens * cached / from_tiers for name, tokens in loaded.items()}
    by_tier = {DEVICE: max(0.0, cached - from_tiers)} | loaded
    return {
        "hit_rate": cached / prompt if prompt else None,
        "by_tier": [
            {"tier": name, "hit_rate": tokens / prompt if prompt else None}
            for name, tokens in by_tier.items()
        ],
    }


def flows(moved: Mapping[str, Counters], elapsed_s: float) -> list[dict[str, Any]]:
    """Blocks per second between the tiers and the device of all workers together."""
    total: Counters = {}
    for edges in moved.values():
        total = plus(total, edges)
    return [
        {
            "source": source,
            "target": target,
            "blocks_per_s": _rate(blocks, elapsed_s),
        }
        for source, targets in total.items()
        for target, blocks in targets.items()
    ]


def handovers(counted: Counters, elapsed_s: float, most: int) -> list[dict[str, Any]]:
    """Hand-overs per second of each pair of workers, the busiest first; those of the window."""
    pairs: Mapping[str, Mapping[str, Any]] = counted.get("handovers", {})
    rows = [
        {
            "prefill": prefill,
            "decode": decode,
            "per_s": _rate(found["count"], elapsed_s),
            "bytes_per_s": _rate(found["bytes"], elapsed_s),
            "failed": int(found["failed"]),
        }
        for prefill, decodes in pairs.items()
        for decode, found in decodes.items()
        if found["count"] or found["failed"]
    ]
    return sorted(rows, key=lambda row: row["bytes_per_s"] or 0.0, reverse=True)[:most]


def principals(counted: Counters, elapsed_s: float, most: int) -> tuple[list[dict[str, Any]], int]:
    """Rates of each principal, the busiest first, and how many are left out."""
    found: Mapping[str, Mapping[str, float]] = counted.get("principals", {})

    def row(name: str, counts: Mapping[str, float]) -> dict[str, Any]:
        prompt = counts.get("prompt_tokens", 0)
        used = {
            f"{what}_per_s": _rate(counts.get(what, 0), elapsed_s)
            for what in ("requests", "prompt_tokens", "output_tokens", "refused")
        }
        rate = counts.get("cached_tokens", 0) / prompt if prompt else None
        return {"name": name, **used, "hit_rate": rate}

    busiest = sorted(found.items(), key=lambda one: (-one[1].get("requests", 0), one[0]))
    return [row(name, counts) for name, counts in busiest[:most]], max(0, len(busiest) - most)


def latest(parts: Sequence[DoorPart], most: int) -> tuple[list[RequestRow], list[Event]]:
    """The last requests and events of all doors, newest first."""
    rows = [row for part in parts for row in part.recent]
    seen: dict[tuple[str, str], float] = {}
    events = []
    for one in sorted(
        (one for part in parts for one in part.events), key=attrgetter("time_unix_s")
    ):
        # Each door sees the same workers come and go, at about the same time.
        if one.time_unix_s - seen.get((one.kind, one.text), -_SAME_S) >= _SAME_S:
            seen[one.kind, one.text] = one.time_unix_s
            events.append(one)
    return sorted(rows, key=lambda row: -row.time_unix_s)[:most], events[: -most - 1 : -1]


def worker_row(
    status: WorkerStatus,
    requests: int,
    load: EngineLoad | None,
    kv: KvStatistics | None,
) -> dict[str, Any]:
    """One worker; ``requests`` are those in flight of all front doors."""
    return _row(status) | {
        "version": status.version,
        "block_size": status.block_size,
        "pid": status.pid,
        "requests": requests,
        "load": load,
        "tiers": [
            {
                "name": tier.name,
                "medium": tier.medium,
                "up": tier.up,
                "blocks": tier.published,
                "capacity_blocks": tier.capacity if tier.capacity < UNBOUNDED else None,
            }
            for tier in (() if kv is None else kv.tiers)
        ],
        "sequence_bytes": [
            {"layers": layers, "token": token, "most": most or None}
            for layers, (token, most) in ({} if kv is None else kv.sequence_bytes).items()
        ],
    }


def unready_row(one: UnreadyWorker) -> dict[str, Any]:
    """A worker that is not in the registry, as ``worker_row`` has the others."""
    start = {name: getattr(one, name) for name in ("cause", "since_unix_s", "next_start_unix_s")}
    return _row(one) | start


def _row(one: WorkerStatus | UnreadyWorker) -> dict[str, Any]:
    """What both say of a worker, and nothing of the rest."""
    said = ("worker_id", "model", "kind", "engine", "host", "role", "state")
    unsaid = ("pid", "cause", "since_unix_s", "next_start_unix_s", "load")
    return {
        **{name: getattr(one, name) for name in said},
        **dict.fromkeys(unsaid),
        "version": "",
        "block_size": None,
        "requests": 0,
        "tiers": [],
        "sequence_bytes": [],
    }


def planning(status: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the planner wants and does, from what it tells of itself; None: no planner answers."""
    if status is None:
        return {"acts": False, "roles": [], "actions": [], "warnings": [], "recent": []}
    last = status["last"] or {"time": None, "roles": {}, "actions": [], "warnings": []}
    shown = ("desired", "proposed", "ready", "starting", "draining", "reason")
    return {
        "kind": status["kind"],
        "mode": status["mode"],
        "acts": status["acts"],
        "interval_s": status["interval_s"],
        "plans": status["plans"],
        "time_unix_s": last["time"],
        "roles": [
            {"role": role, **{name: one[name] for name in shown}}
            for role, one in last["roles"].items()
        ],
        "actions": last["actions"],
        "warnings": last["warnings"],
        "recent": status["recent"],
    }

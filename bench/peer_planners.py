"""Planners of other projects, made again from their sources and documents, to compare with. Pure.

Each takes what its original takes, at the original's interval, and has the original's defaults; one
number, its knob, makes it more or less generous. Sources, as read in 2026: Kubernetes'
HorizontalPodAutoscaler, AIBrix (`pkg/controller/podautoscaler`), Ray Serve's autoscaling policy,
llm-d's workload variant autoscaler, and the wheel `ai-dynamo` 1.6.1 (`dynamo/planner/core`), whose
own state machine needs models of real GPUs. They plan one role.

``python -m bench.peer_planners TRACE FILE NAMES`` is `commutator replay --compare-planners NAMES`,
and knows these names too: `hpa`, `hpa:8` with its knob, `hpa:best` with the best one in hindsight.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from attrs import define, evolve, frozen
from rich.console import Console

from commutator.config.load import load_config
from commutator.contract.planner import (
    Arrivals,
    EnginePerformance,
    Observation,
    PlannedWorker,
    PlannerConfig,
    PlannerContext,
    PlannerPolicy,
    PlannerTargets,
    Proposal,
    Sizing,
    WorkerPhase,
)
from commutator.contract.worker import Role
from commutator.errors import ConfigError
from commutator.planning import within
from commutator_replay.cli import by_planner
from commutator_replay.planners import OURS, PlannedReplays, PlanReport
from commutator_replay.setup import Replays
from commutator_replay.tables import load_trace
from commutator_replay.trace import TraceRequest
from commutator_slo.config import SloConfig
from commutator_slo.growth import Growth, GrowthConfig, GrowthState
from commutator_slo.plugin import Slo

__all__ = [
    "PEERS",
    "Kalman",
    "Load",
    "Peer",
    "PeerKind",
    "PeerPolicy",
    "PeerReplays",
    "apa_count",
    "dynamo_capacity_per_s",
    "dynamo_load_change",
    "hpa_count",
    "kpa_count",
    "ray_count",
    "wva_count",
    "wva_saturation_change",
]

_ROUNDING = 1e-9
_TOLERANCE = 0.1
"""A ratio to the target so close to 1 changes nothing: Kubernetes and AIBrix."""
_SATURATED_KV, _SATURATED_QUEUE = 0.8, 5
"""llm-d: a worker with as much of its KV memory in use, or as many waiting requests, is full."""
_SPARE_KV, _SPARE_QUEUE = 0.1, 3
"""llm-d: the room that workers should have on average."""
_WVA_S = 60.0
_DYNAMO_THROUGHPUT_S = 180.0
_DYNAMO_STEP = 8
_KALMAN_POINTS = 5
_A_FEW = 2
"""The fewest workers of which one can go."""


# ------------------------------------------------------------------------ what they see


@frozen(kw_only=True)
class Load:
    """A worker that serves, as its metrics tell."""

    running: float
    """Requests that decode."""
    waiting_tokens: float
    """Prompt tokens that are not computed."""
    waiting: float
    """Requests whose prompt is not computed."""


@frozen(kw_only=True)
class Seen:
    """What a peer is told at a tick."""

    time_s: float
    ready: Sequence[Load]
    starting: int
    desired: int
    """Workers that it asked for last."""
    requests_per_s: float
    """Arrivals since the tick before."""
    prompt_tokens: float
    """Mean tokens that are computed for a prompt, the last that were seen."""
    context_tokens: float
    """Mean tokens of a prompt."""
    output_tokens: float
    """Mean tokens of an answer."""

    @property
    def ongoing(self) -> float:
        """Requests in flight at workers that serve."""
        return sum(one.running + one.waiting for one in self.ready)

    @property
    def kv_tokens(self) -> float:
        """KV memory of a request that decodes, on average."""
        return self.context_tokens + self.output_tokens / 2


class Peer(ABC):
    """Decides a number of workers at each tick. Keeps state; one serves one replay."""

    interval_s: float

    @abstractmethod
    def desired(self, seen: Seen) -> int:
        """The number of workers; bounds and budget come later."""


@define
class _PeerState:
    desired: int | None = None
    prompt_tokens: float = 0.0
    context_tokens: float = 0.0
    output_tokens: float = 0.0


class PeerPolicy(PlannerPolicy[_PeerState]):
    """Shows a peer what it would measure; within bounds and budget its wish is what is planned."""

    def __init__(self, peer: Peer, config: PlannerConfig, role: Role) -> None:
        self._peer = peer
        self._config = config
        self._role = role

    def begin(self) -> _PeerState:
        return _PeerState()

    def propose(self, state: _PeerState, seen: Observation) -> tuple[_PeerState, Sizing]:
        role, workers = self._role, seen.workers or ()
        arrived = (seen.arrivals or {}).get(role, Arrivals())
        if arrived.requests:
            state.prompt_tokens = arrived.prompt_tokens / arrived.requests
            state.context_tokens = arrived.context_tokens / arrived.requests
        if seen.output_tokens is not None:
            state.output_tokens = seen.output_tokens
        ready = [one for one in workers if one.phase is WorkerPhase.READY]
        starting = sum(one.phase is WorkerPhase.STARTING for one in workers)
        wanted = self._peer.desired(
            Seen(
                time_s=seen.time_s,
                ready=[_load(one, state.prompt_tokens) for one in ready],
                starting=starting,
                desired=len(ready) + starting if state.desired is None else state.desired,
                requests_per_s=arrived.requests / seen.window_s if seen.window_s else 0.0,
                prompt_tokens=state.prompt_tokens,
                context_tokens=state.context_tokens,
                output_tokens=state.output_tokens,
            )
        )
        state.desired = within(self._config, {role: wanted}, {role: []})[role]
        return state, Sizing(roles={role: Proposal(workers=wanted, reason=f"need {wanted}")})


def _load(worker: PlannedWorker, prompt_tokens: float) -> Load:
    waiting = 0.0
    if worker.active_prefill_tokens:
        waiting = worker.active_prefill_tokens / max(1.0, prompt_tokens)
        waiting = min(float(worker.active_requests), max(1.0, waiting))
    return Load(
        running=worker.active_requests - waiting,
        waiting_tokens=worker.active_prefill_tokens,
        waiting=waiting,
    )


class _Recent:
    """Values of the last seconds."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._values: deque[tuple[float, float]] = deque()

    def add(self, time_s: float, value: float) -> Sequence[float]:
        """Add one; returns all that are not too old."""
        self._values.append((time_s, value))
        while self._values[0][0] <= time_s - self._span_s:
            self._values.popleft()
        return [value for _, value in self._values]

    def most(self, seen: Seen, wanted: int) -> int:
        """The largest count of the last seconds; the workers that there were at first count too."""
        if not self._values:
            self.add(seen.time_s, seen.desired)
        return round(max(self.add(seen.time_s, wanted)))


def _ceil(value: float) -> int:
    return math.ceil(value - _ROUNDING)


# ------------------------------------------------- by requests in flight at each worker


def hpa_count(workers: int, load: float, target: float, tolerance: float = _TOLERANCE) -> int:
    """Kubernetes: in proportion to ``load / target``, and as it is where that is nearly 1."""
    ratio = load / target
    return workers if abs(ratio - 1) <= tolerance + _ROUNDING else _ceil(workers * ratio)


class Hpa(Peer):
    """Kubernetes' autoscaler: every 15 s, up at once, down to the most of the last 300 s."""

    interval_s = 15.0

    def __init__(self, target: float) -> None:
        self._target = target
        self._recent = _Recent(300.0)

    def desired(self, seen: Seen) -> int:
        workers = seen.desired
        wanted = hpa_count(workers, seen.ongoing / max(1, workers), self._target)
        wanted = min(wanted, max(2 * workers, workers + 4))
        return self._recent.most(seen, wanted)


def kpa_count(workers: int, total: float, target: float) -> int:
    """AIBrix's KPA: ``total / target``, at most twice and at least half of what there is."""
    return min(max(_ceil(total / target), workers // 2), 2 * workers)


class Kpa(Peer):
    """AIBrix's KPA: means of 180 s, or of 60 s in a panic, when that is more than twice as much."""

    interval_s = 10.0

    def __init__(self, target: float) -> None:
        self._target = target
        self._stable, self._panic = _Recent(180.0), _Recent(60.0)
        self._recent = _Recent(300.0)
        self._panic_until_s = -math.inf

    def desired(self, seen: Seen) -> int:
        stable = self._stable.add(seen.time_s, seen.ongoing)
        panic = self._panic.add(seen.time_s, seen.ongoing)
        stable_load, panic_load = sum(stable) / len(stable), sum(panic) / len(panic)
        if panic_load > 2 * stable_load:
            self._panic_until_s = seen.time_s + 60.0
        in_panic = seen.time_s < self._panic_until_s
        workers = max(1, seen.desired)
        load = panic_load if in_panic else stable_load
        if abs(load / (workers * self._target) - 1) <= _TOLERANCE:
            wanted = workers
        else:
            wanted = kpa_count(workers, load, self._target)
        if in_panic:
            wanted = max(wanted, workers)
        return self._recent.most(seen, wanted)


def apa_count(workers: int, load: float, target: float) -> int:
    """AIBrix's APA: in proportion beyond a tenth, at most twice, at least half."""
    ratio = load / target
    if ratio > 1 + _TOLERANCE:
        return min(_ceil(workers * ratio), 2 * workers)
    if ratio < 1 - _TOLERANCE:
        return max(_ceil(workers * ratio), workers // 2)
    return workers


class Apa(Peer):
    """AIBrix's APA: every 10 s, down to the most of the last 300 s."""

    interval_s = 10.0

    def __init__(self, target: float) -> None:
        self._target = target
        self._recent = _Recent(300.0)

    def desired(self, seen: Seen) -> int:
        workers = max(1, seen.desired)
        wanted = apa_count(workers, seen.ongoing / workers, self._target)
        return self._recent.most(seen, wanted)


def ray_count(workers: int, ongoing: float, target: float = 2.0, factor: float = 1.0) -> int:
    """Ray Serve: by the error of the requests in flight at each replica."""
    error = ongoing / (target * workers)
    return _ceil(workers * (1 + (error - 1) * factor))


class Ray(Peer):
    """Ray Serve: means of 30 s; up when wanted for 30 s, down when wanted for 600 s."""

    interval_s = 10.0

    def __init__(self, target: float) -> None:
        self._target = target
        self._load = _Recent(30.0)
        self._since_s: float | None = None
        self._grows = False

    def desired(self, seen: Seen) -> int:
        loads = self._load.add(seen.time_s, seen.ongoing)
        workers = max(1, seen.desired)
        wanted = ray_count(workers, sum(loads) / len(loads), self._target)
        if wanted == workers:
            self._since_s = None
            return workers
        if self._since_s is None or self._grows is not (wanted > workers):
            self._since_s, self._grows = seen.time_s, wanted > workers
        if seen.time_s - self._since_s < (30.0 if self._grows else 600.0):
            return workers
        self._since_s = None
        return wanted


# --------------------------------------------------------------------------------- llm-d


def wva_saturation_change(kv_use: Sequence[float], queues: Sequence[float]) -> int:
    """llm-d's variant autoscaler, version 1: -1, 0 or 1 worker, by the spare room of all.

    ``kv_use`` of each worker from 0 to 1; ``queues``: requests that wait at each.
    """
    pairs = list(zip(kv_use, queues, strict=True))
    free = [(kv, queue) for kv, queue in pairs if kv < _SATURATED_KV and queue < _SATURATED_QUEUE]
    if not free:
        return 1

    def is_short(scale: float) -> bool:
        spare_kv = sum(_SATURATED_KV - kv * scale for kv, _ in free) / len(free)
        spare_queue = sum(_SATURATED_QUEUE - queue * scale for _, queue in free) / len(free)
        return spare_kv < _SPARE_KV or spare_queue < _SPARE_QUEUE

    if is_short(1.0):
        return 1
    workers = len(pairs)
    return 0 if workers < _A_FEW or is_short(workers / (workers - 1)) else -1


class WvaSaturation(Peer):
    """llm-d's variant autoscaler, version 1: every 60 s, and not while a worker starts."""

    interval_s = 60.0

    def __init__(self, factor: float, performance: EnginePerformance) -> None:
        self._factor = factor
        self._kv_tokens = performance.kv_tokens

    def desired(self, seen: Seen) -> int:
        if seen.starting or not seen.ready:
            return seen.desired
        room = self._kv_tokens * self._factor
        use = [one.running * seen.kv_tokens / room for one in seen.ready]
        waiting = [one.waiting / self._factor for one in seen.ready]
        return len(seen.ready) + wva_saturation_change(use, waiting)


def wva_count(ready: int, pending: int, capacity: float, demand: float) -> int:
    """llm-d's variant autoscaler, version 2: workers that ``demand`` tokens need.

    ``capacity``: tokens that one worker holds before it is saturated.
    """
    required = demand / 0.85 - capacity * (ready + pending)
    if required > 0:
        return ready + pending + _ceil(required / capacity)
    spare = capacity * ready - demand / 0.70
    if spare > 0 and not pending:
        return max(1, ready - math.floor(spare / capacity + _ROUNDING))
    return ready + pending


class Wva(Peer):
    """llm-d's variant autoscaler, version 2: every 60 s, by the most of that minute."""

    interval_s = 15.0

    def __init__(self, factor: float, performance: EnginePerformance) -> None:
        self._factor = factor
        self._performance = performance
        self._saturated: deque[float] = deque(maxlen=10)
        """Tokens in use at workers when they were last saturated."""
        self._demand = 0.0
        self._planned_s = -math.inf

    def desired(self, seen: Seen) -> int:
        performance = self._performance
        use = [one.running * seen.kv_tokens for one in seen.ready]
        for load, tokens in zip(seen.ready, use, strict=True):
            full = tokens >= _SATURATED_KV * performance.kv_tokens
            if full or load.waiting >= _SATURATED_QUEUE:
                self._saturated.append(tokens)
        waiting = sum(load.waiting for load in seen.ready) * seen.context_tokens
        self._demand = max(self._demand, sum(use) + waiting)
        if seen.time_s - self._planned_s < _WVA_S or not seen.output_tokens:
            return seen.desired
        demand, self._demand, self._planned_s = self._demand, 0.0, seen.time_s
        if self._saturated:
            learned = sum(self._saturated) / len(self._saturated)
        else:
            prompt, answer = seen.context_tokens, seen.output_tokens
            batch = performance.max_step_tokens * answer / (prompt + answer)
            learned = min(batch, performance.max_running) * seen.kv_tokens
        capacity = min(_SATURATED_KV * performance.kv_tokens, max(1.0, learned)) * self._factor
        return wva_count(len(seen.ready), seen.starting, capacity, demand)


# -------------------------------------------------------------------------------- Dynamo


def _dynamo_step_s(performance: EnginePerformance, tokens: float, batch: float) -> float:
    return (
        performance.step_s
        + performance.step_request_s * batch
        + tokens / performance.prefill_tokens_per_s
    )


def _dynamo_prefill_s(performance: EnginePerformance, tokens: float, batch: float) -> float:
    """The time of the steps that compute these prompt tokens, beside a batch that decodes."""
    chunk = max(1.0, performance.max_step_tokens - batch)
    steps = math.ceil(tokens / chunk)
    return steps * _dynamo_step_s(performance, 0, batch) + (
        tokens / performance.prefill_tokens_per_s
    )


def dynamo_capacity_per_s(
    performance: EnginePerformance,
    targets: PlannerTargets,
    prompt_tokens: float,
    output_tokens: float,
) -> tuple[float, int]:
    """Requests a second of an aggregated worker, by a search over batches, and the batch found.

    The largest rate within both targets, as without a queue; where no batch is within them, the
    rate of the one that is answered first.
    """
    context = prompt_tokens + output_tokens / 2
    most = min(
        performance.max_running,
        performance.max_step_tokens - 1,
        max(1, int(performance.kv_tokens / context)),
    )
    count = min(most, 128)
    best: tuple[bool, float, float, int] | None = None
    for number in range(count):
        batch = 1 + (number * (most - 1) // (count - 1) if count > 1 else 0)
        chunk = math.ceil(batch * prompt_tokens / output_tokens)
        if chunk > performance.max_step_tokens - batch:
            continue
        itl_s = _dynamo_step_s(performance, chunk, batch)
        ttft_s = _dynamo_prefill_s(performance, chunk + prompt_tokens, batch)
        meets = itl_s <= targets.itl_s and ttft_s <= targets.ttft_s
        rate = batch / (output_tokens * itl_s)
        merit = rate if meets else -(ttft_s + itl_s * (output_tokens - 1))
        if best is None or (meets, merit) > best[:2]:
            best = (meets, merit, rate, batch)
    return (best[2], best[3]) if best is not None else (0.0, 0)


def dynamo_load_change(
    performance: EnginePerformance,
    targets: PlannerTargets,
    loads: Sequence[Load],
    *,
    prompt_tokens: float,
    kv_tokens: float,
    output_tokens: float,
    sensitivity: float = 0.8,
) -> int:
    """Dynamo's load loop for aggregated workers: -1, 0 or 1 worker.

    One more when every worker is above the target of TTFT, or every one above that of ITL. One
    fewer when, with the queues and batches of N/(N-1), all stay below ``sensitivity`` of both: of
    TTFT only the part that queues cause.
    """
    if not loads:
        return 0
    fresh = prompt_tokens / output_tokens if output_tokens else 0.0

    def itl_s(batch: float) -> float:
        return _dynamo_step_s(performance, fresh * batch, batch)

    def ttft_s(load: Load, scale: float) -> float:
        tokens = load.waiting_tokens * scale + prompt_tokens
        return _dynamo_prefill_s(performance, tokens, load.running * scale)

    if all(ttft_s(one, 1.0) > targets.ttft_s for one in loads):
        return 1
    if all(itl_s(one.running + one.waiting) > targets.itl_s for one in loads):
        return 1
    if len(loads) < _A_FEW:
        return 0
    scale = len(loads) / (len(loads) - 1)

    def may_go(one: Load) -> bool:
        own_s = _dynamo_prefill_s(performance, prompt_tokens, one.running * scale)
        budget_s = (targets.ttft_s - own_s) * sensitivity
        held = (one.running * kv_tokens + one.waiting_tokens) * scale
        return (
            budget_s > 0
            and ttft_s(one, scale) - own_s < budget_s
            and held < performance.kv_tokens
            and itl_s((one.running + one.waiting) * scale) < targets.itl_s * sensitivity
        )

    return -1 if all(map(may_go, loads)) else 0


class DynamoLoad(Peer):
    """Dynamo's load loop to targets: every 5 s one worker, none more while one starts."""

    interval_s = 5.0

    def __init__(
        self, factor: float, performance: EnginePerformance, targets: PlannerTargets
    ) -> None:
        """``factor`` on both targets."""
        self._performance = performance
        self._targets = _scaled(targets, factor)

    def desired(self, seen: Seen) -> int:
        if not seen.output_tokens:
            return seen.desired
        change = dynamo_load_change(
            self._performance,
            self._targets,
            seen.ready,
            prompt_tokens=seen.prompt_tokens,
            kv_tokens=seen.kv_tokens,
            output_tokens=seen.output_tokens,
        )
        return _dynamo_target(seen, change)


class DynamoEasy(Peer):
    """Dynamo's default mode: one more above all of the KV memory, one fewer below 60 %."""

    interval_s = 5.0

    def __init__(self, factor: float, performance: EnginePerformance) -> None:
        """``factor`` on both thresholds."""
        self._kv_tokens = performance.kv_tokens
        self._up, self._down = 1.0 * factor, 0.6 * factor

    def desired(self, seen: Seen) -> int:
        use = [
            (one.running * seen.kv_tokens + one.waiting_tokens) / self._kv_tokens
            for one in seen.ready
        ]
        change = 0
        if any(one > self._up for one in use):
            change = 1
        elif len(use) > 1 and all(one < self._down for one in use):
            scale = len(use) / (len(use) - 1)
            change = -1 if max(use) * scale < self._up else 0
        return _dynamo_target(seen, change)


def _dynamo_target(seen: Seen, change: int) -> int:
    if change > 0 and seen.starting:
        return seen.desired
    return len(seen.ready) + change if change else seen.desired


class Kalman:
    """Dynamo's Kalman predictor: level and trend, one value and one prediction a time."""

    def __init__(self) -> None:
        self._level = self._trend = 0.0
        self._var = [[1000.0, 0.0], [0.0, 1000.0]]
        self._values = 0

    def next(self, value: float) -> float:
        """Take a value; returns the prediction of the next one."""
        (ll, lt), (_, tt) = self._var
        if not self._values:
            self._level = value
        else:
            gain_level, gain_trend = ll / (ll + 10.0), lt / (ll + 10.0)
            error = value - self._level
            self._level += gain_level * error
            self._trend += gain_trend * error
            ll, lt, tt = ll * (1 - gain_level), lt * (1 - gain_level), tt - gain_trend * lt
        self._values += 1
        # Below its least number of points it tells the last value.
        told = value if self._values < _KALMAN_POINTS else max(0.0, self._level + self._trend)
        self._level += self._trend
        ll, lt, tt = ll + 2 * lt + tt + 1.0, lt + tt, tt + 0.1
        self._var = [[ll, lt], [lt, tt]]
        return told


class DynamoSla(Peer):
    """Dynamo's throughput loop of 180 s, as the floor of its load loop of 5 s."""

    interval_s = 5.0

    def __init__(
        self,
        factor: float,
        performance: EnginePerformance,
        targets: PlannerTargets,
        *,
        predict: Callable[[], Callable[[float], float]],
    ) -> None:
        """``factor`` on both targets; ``predict`` makes a predictor."""
        self._performance = performance
        self._targets = _scaled(targets, factor)
        self._predict = [predict() for _ in range(3)]
        self._load = DynamoLoad(factor, performance, targets)
        self._requests: list[float] = []
        self._prompts: list[float] = []
        self._floor = 1
        self._planned_s: float | None = None

    def desired(self, seen: Seen) -> int:
        if self._planned_s is None:
            self._planned_s = seen.time_s
        self._requests.append(seen.requests_per_s)
        self._prompts.append(seen.prompt_tokens * seen.requests_per_s)
        if seen.time_s - self._planned_s >= _DYNAMO_THROUGHPUT_S and seen.output_tokens:
            self._planned_s = seen.time_s
            self._floor = self._floor_of(seen)
        return max(self._load.desired(seen), self._floor)

    def _floor_of(self, seen: Seen) -> int:
        total = sum(self._requests)
        rate = total / len(self._requests)
        prompt = sum(self._prompts) / total if total else seen.prompt_tokens
        self._requests, self._prompts = [], []
        requests, prompt, answer = (
            predict(value)
            for predict, value in zip(
                self._predict,
                (rate * _DYNAMO_THROUGHPUT_S, prompt, seen.output_tokens),
                strict=True,
            )
        )
        capacity, _ = dynamo_capacity_per_s(
            self._performance, self._targets, max(1.0, prompt), max(1.0, answer)
        )
        now = len(seen.ready)
        if capacity <= 0:
            return now
        wanted = _ceil(requests / _DYNAMO_THROUGHPUT_S / capacity)
        return min(max(wanted, now - _DYNAMO_STEP, 1), now + _DYNAMO_STEP)


def _scaled(targets: PlannerTargets, factor: float) -> PlannerTargets:
    return evolve(targets, ttft_s=targets.ttft_s * factor, itl_s=targets.itl_s * factor)


# ------------------------------------------------------------------------------ the kinds


@frozen(kw_only=True)
class PeerKind:
    """A peer that can be named."""

    make: Callable[[float, EnginePerformance, PlannerTargets], Peer]
    default: float | None
    """The knob's documented value; None: its project names none, so it is searched for."""
    least: float
    most: float
    """Between these the knob is searched for; more knob means fewer workers."""


def _last_value() -> Callable[[float], float]:
    return lambda value: value


def _kalman() -> Callable[[float], float]:
    return Kalman().next


def _by_target(make: Callable[[float], Peer], default: float | None = None) -> PeerKind:
    return PeerKind(
        make=lambda knob, _performance, _targets: make(knob), default=default, least=0.5, most=256.0
    )


def _by_engine(make: Callable[[float, EnginePerformance], Peer]) -> PeerKind:
    return PeerKind(
        make=lambda knob, performance, _targets: make(knob, performance),
        default=1.0,
        least=0.005,
        most=2.0,
    )


def _dynamo(make: Callable[[float, EnginePerformance, PlannerTargets], Peer]) -> PeerKind:
    return PeerKind(make=make, default=1.0, least=0.05, most=2.0)


PEERS: Mapping[str, PeerKind] = {
    "hpa": _by_target(Hpa),
    "kpa": _by_target(Kpa),
    "apa": _by_target(Apa),
    "ray": _by_target(Ray, 2.0),
    "wva": _by_engine(Wva),
    "wva_saturation": _by_engine(WvaSaturation),
    "dynamo_easy": _by_engine(DynamoEasy),
    "dynamo_load": _dynamo(DynamoLoad),
    "dynamo_sla": _dynamo(partial(DynamoSla, predict=_last_value)),
    "dynamo_sla_kalman": _dynamo(partial(DynamoSla, predict=_kalman)),
}
"""Peers by name."""


# ------------------------------------------------------------------------------ in replays

BEST = "best"
"""In the place of a knob: the one of the cheapest fleet that attains the targets, in hindsight."""


class _Times(Growth):
    """Growth as it is forecast, times a factor."""

    def __init__(self, config: GrowthConfig, factor: float) -> None:
        super().__init__(config)
        self._factor = factor

    def growth(self, state: GrowthState) -> float:
        return super().growth(state) * self._factor


class PeerReplays(PlannedReplays):
    """Replays that know peers by name, unless a planner of that name is installed."""

    def check(self, name: str, option: str) -> None:
        kind, _, knob = name.partition(":")
        if not self._is_peer(kind):
            super().check(name, option)
        elif name != kind and knob != BEST and not _is_positive(knob):
            problem = f"{name}: expected {kind}, {kind}:{BEST}, or {kind}:X with X above 0"
            raise ConfigError([problem], option)

    def run(self, name: str, trace: Sequence[TraceRequest]) -> PlanReport:
        kind, _, knob = name.partition(":")
        if not self._is_peer(kind):
            return super().run(name, trace)
        wanted = PEERS[kind].default if not knob else None if knob == BEST else float(knob)
        if wanted is not None:
            return self.peer(kind, wanted, trace)
        fewest, most = math.log(PEERS[kind].most), math.log(PEERS[kind].least)
        return self.cheapest(lambda knob: self.peer(kind, math.exp(knob), trace), fewest, most)

    def peer(self, kind: str, knob: float, trace: Sequence[TraceRequest]) -> PlanReport:
        """Replay under a peer, with this value of its knob, beginning with the file's workers."""
        role, performance = self.only_role()
        peer = PEERS[kind].make(knob, performance, self.config.targets)
        config = evolve(self.config, interval_s=peer.interval_s)
        return self.under(f"{kind}:{knob:.3g}", PeerPolicy(peer, config, role), trace, config)

    def ours(
        self, headroom: float, trace: Sequence[TraceRequest], attainment: float | None = None
    ) -> PlanReport:
        """Replay under the file's planner `slo`, whose forecasts count ``1 + headroom`` times.

        ``attainment``: what is asked, instead of what the file says.
        """
        config = self.config
        if attainment is not None:
            config = evolve(config, targets=evolve(config.targets, attainment=attainment))

        def make(config: SloConfig, context: PlannerContext) -> Slo:
            times = None
            if headroom and config.forecaster is not None:
                times = _Times(config.forecaster, 1 + headroom)
            return Slo(config, context, growth=times)

        return self.planned(OURS, config, trace, make)

    def _is_peer(self, kind: str) -> bool:
        return kind in PEERS and kind not in self.replays.loaded.host.planners.kinds


def _is_positive(written: str) -> bool:
    try:
        return 0 < float(written) < math.inf
    except ValueError:
        return False


def main(trace: str, file: str, written: str) -> None:
    """Print how planners compare."""
    replays = PeerReplays(
        Replays(load_config([Path(file)]), file, trace, PlannerTargets(ttft_s=1, itl_s=1))
    )
    names = replays.names(written, "NAMES")
    requests = load_trace(Path(trace))
    Console().print(by_planner([replays.run(name, requests) for name in names]))


if __name__ == "__main__":
    main(*sys.argv[1:])

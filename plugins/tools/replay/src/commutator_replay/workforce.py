"""The workers of a replay that a planner launches and drains, in virtual time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from commutator.contract.planner import Observation, PlannedWorker, WorkerPhase
from commutator.contract.worker import Role
from commutator.demand import ArrivalCounts
from commutator.planning import ActionKind, FleetPlanner, Plan, PlanAction
from commutator.routing.load import InFlightLoad
from commutator_replay.fleet import VirtualFleet, VirtualWorker
from commutator_replay.virtual import VirtualEngine
from commutator_slo.learned import StepMeter

if TYPE_CHECKING:
    from commutator_replay.replay import Replay
    from commutator_replay.tuning import ReplayTuning


@frozen(kw_only=True)
class Planning:
    """What plans the workers of a replay, and how they are made."""

    planner: FleetPlanner[Any]
    make_engine: Mapping[Role, Callable[[], VirtualEngine]]
    """Makes a worker of each role that the fleet may have."""
    may_become: Mapping[Role, Collection[Role]] = field(factory=dict)
    """The roles that a worker of a role could be given instead."""
    tuning: ReplayTuning | None = None
    """Tunes the policies; None: they stay as they are."""


@frozen
class Span:
    """A worker's life in one role, from launch to exit, which is what it costs."""

    role: Role
    launched_ns: int
    exited_ns: int

    @property
    def hours(self) -> float:
        return (self.exited_ns - self.launched_ns) / 3.6e12


@frozen
class Tick:
    """One plan, and the workers that there were."""

    plan: Plan
    offered: float
    """Requests a second that arrived since the plan before."""
    attained: float | None = None
    """The part of what was answered since then that met the targets; None: nothing was."""


@define
class _Worker:
    worker_id: str
    role: Role
    launched_ns: int
    phase: WorkerPhase
    virtual: VirtualWorker | None = None
    """None until it is ready."""
    served_ns: int = 0
    """When its last request ended."""
    billed_ns: int = 0
    """When it got its role."""
    becomes: Role | None = None
    """The role that it gets once it has no requests."""


class Workforce:
    """Observes a replay, asks its planner, and does what the plan says, at every interval."""

    def __init__(
        self,
        planning: Planning,
        workers: Sequence[VirtualWorker],
        fleet: VirtualFleet,
        load: InFlightLoad,
        routed: Replay,
    ) -> None:
        """``workers`` are ready at the first request."""
        self._planning = planning
        self._fleet = fleet
        self._load = load
        self._routed = routed
        self._config = planning.planner.config
        self._state = planning.planner.begin()
        self._first = workers
        self._workers: dict[str, _Worker] = {}
        self._launched = len(workers)
        self._counted: dict[Role, ArrivalCounts] = {}
        """The arrivals since the last plan."""
        self._answers = self._answer_tokens = self._in_time = 0
        self._firsts = self._firsts_in_time = 0
        self._meters: dict[Role, StepMeter] = {}
        self._started_s: list[float] = []
        self._observed_ns: int | None = None
        self.spans: list[Span] = []
        self.ticks: list[Tick] = []

    def begin(self) -> None:
        """Call it at the first request, before that counts."""
        now_ns = self._fleet.now_ns
        for virtual in self._first:
            self._workers[virtual.worker_id] = _Worker(
                virtual.worker_id, virtual.role, now_ns, WorkerPhase.READY, virtual, now_ns, now_ns
            )
        self._tick()

    def arrived(self, role: Role, prompt_tokens: int, context_tokens: int) -> None:
        """A request of ``context_tokens`` has arrived; the role computes ``prompt_tokens``."""
        counted = self._counted.setdefault(role, ArrivalCounts())
        counted.came(self._fleet.now_ns / 1e9)
        counted.count(prompt_tokens, context_tokens)

    def began(
        self, key: int, worker_id: str, prompt_tokens: int, ahead_tokens: int, time_ns: int
    ) -> None:
        """A worker that answers has got a request, as ``StepMeter.began``."""
        meter = self._meters.setdefault(self._workers[worker_id].role, StepMeter())
        meter.began(
            key, worker_id, time_ns / 1e9, prompt_tokens=prompt_tokens, ahead_tokens=ahead_tokens
        )

    def first_token(self, key: int, worker_id: str, ttft_s: float, time_ns: int) -> None:
        """The first token of its answer has come."""
        self._firsts += 1
        self._firsts_in_time += ttft_s <= self._config.targets.ttft_s
        self._meters[self._workers[worker_id].role].answered(key, worker_id, time_ns / 1e9)

    def answered(
        self, key: int, worker_id: str, output_tokens: int, itl_s: float, time_ns: int
    ) -> None:
        """An answer has ended."""
        self._answers += 1
        self._in_time += itl_s <= self._config.targets.itl_s
        self._answer_tokens += output_tokens
        worker = self._workers[worker_id]
        worker.served_ns = time_ns
        self._meters[worker.role].ended(key, worker_id, output_tokens, time_ns / 1e9)

    def prefilled(self, worker_id: str, prompt_tokens: int, began_ns: int, time_ns: int) -> None:
        """A prefill worker has computed a prompt; ``prompt_tokens`` with those before it."""
        self._workers[worker_id].served_ns = time_ns
        if time_ns > began_ns:
            meter = self._meters.setdefault(Role.PREFILL, StepMeter())
            meter.prefilled((time_ns - began_ns) / 1e9, prompt_tokens)

    def end(self, time_ns: int) -> None:
        """Bill the workers that are left."""
        for worker in list(self._workers.values()):
            self._exit(worker, time_ns)

    def _tick(self) -> None:
        now_ns = self._fleet.now_ns
        self._fleet.catch_up()
        for worker in list(self._workers.values()):
            if worker.becomes is not None and self._is_idle(worker):
                self._change_role(worker, worker.becomes)
            elif worker.phase is WorkerPhase.DRAINING and self._is_idle(worker):
                self._exit(worker, worker.served_ns)
        seen = self._observation(now_ns)
        self._state, plan = self._planning.planner.plan(self._state, seen)
        requests = sum(counted.requests for counted in self._counted.values())
        offered = requests / seen.window_s if seen.window_s else 0.0
        known = [one for one in (seen.attained_ttft, seen.attained_itl) if one is not None]
        self.ticks.append(Tick(plan, offered, min(known, default=None)))
        self._observed_ns = now_ns
        self._counted = {r: ArrivalCounts(last_s=one.last_s) for r, one in self._counted.items()}
        self._answers = self._answer_tokens = self._in_time = 0
        self._firsts = self._firsts_in_time = 0
        self._started_s = []
        for action in plan.actions:
            self._do(action)
        if self._planning.tuning is not None:
            workers = [self._seen(one, now_ns, 0) for one in self._workers.values()]
            self._planning.tuning.tick(now_ns / 1e9, workers)
        if not self._routed.is_over():
            interval_ns = round(self._config.interval_s * 1e9)
            self._fleet.alarm(now_ns + interval_ns, self._tick)

    def _observation(self, now_ns: int) -> Observation:
        window_ns = 0 if self._observed_ns is None else now_ns - self._observed_ns
        cached = self._routed.cached_blocks()
        return Observation(
            time_s=now_ns / 1e9,
            window_s=window_ns / 1e9,
            arrivals={r: one.arrivals() for r, one in self._counted.items() if one.requests},
            workers=[
                self._seen(worker, now_ns, cached.get(worker.worker_id, 0))
                for worker in self._workers.values()
            ],
            output_tokens=self._answer_tokens / self._answers if self._answers else None,
            started_s=self._started_s,
            waiting_tokens=self._routed.waiting_tokens(),
            attained_ttft=self._firsts_in_time / self._firsts if self._firsts else None,
            attained_itl=self._in_time / self._answers if self._answers else None,
            measured={role: meter.take() for role, meter in self._meters.items()},
        )

    def _seen(self, worker: _Worker, now_ns: int, cached_blocks: int) -> PlannedWorker:
        load = self._load.of(worker.worker_id)
        return PlannedWorker(
            worker_id=worker.worker_id,
            role=worker.becomes or worker.role,
            phase=worker.phase if worker.becomes is None else WorkerPhase.STARTING,
            age_s=(now_ns - worker.launched_ns) / 1e9 if worker.becomes is None else 0.0,
            active_requests=load.active_requests,
            active_prefill_tokens=load.active_prefill_tokens,
            cached_blocks=cached_blocks,
            may_become=self._planning.may_become.get(worker.role, ()),
        )

    def _do(self, action: PlanAction) -> None:
        now_ns = self._fleet.now_ns
        if action.worker_id is None:
            self._launch(action.role)
            return
        worker = self._workers[action.worker_id]
        if action.kind is ActionKind.CANCEL and worker.becomes is None:
            self._exit(worker, now_ns)
            return
        assert worker.virtual is not None, "only a worker that was ready is drained"
        if action.kind is ActionKind.CANCEL:
            worker.becomes = None
            self._routed.add(worker.virtual)
        elif action.kind is ActionKind.SET_ROLE:
            worker.becomes = action.role
            self._routed.drain(worker.virtual)
        elif action.kind is ActionKind.DRAIN:
            worker.phase = WorkerPhase.DRAINING
            worker.served_ns = max(worker.served_ns, now_ns)
            self._routed.drain(worker.virtual)
        else:
            worker.phase = WorkerPhase.READY
            self._routed.add(worker.virtual)

    def _launch(self, role: Role) -> None:
        worker_id = f"worker-{self._launched:03}"
        self._launched += 1
        now_ns = self._fleet.now_ns
        self._workers[worker_id] = _Worker(
            worker_id, role, now_ns, WorkerPhase.STARTING, billed_ns=now_ns
        )
        start_up_ns = round(self._config.start_up_s * 1e9)
        self._fleet.alarm(now_ns + start_up_ns, partial(self._ready, worker_id))

    def _ready(self, worker_id: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is None:  # its launch was cancelled
            return
        engine = self._planning.make_engine[worker.role]()
        worker.virtual = VirtualWorker.make(worker_id, engine, worker.role)
        worker.phase = WorkerPhase.READY
        worker.served_ns = self._fleet.now_ns
        self._started_s.append((self._fleet.now_ns - worker.launched_ns) / 1e9)
        self._fleet.add(worker_id, engine)
        self._routed.add(worker.virtual)

    def _change_role(self, worker: _Worker, role: Role) -> None:
        """A worker without requests gets its new role, with the cache that it has."""
        assert worker.virtual is not None, "only a worker that was ready changes its role"
        now_ns = self._fleet.now_ns
        self.spans.append(Span(worker.role, worker.billed_ns, now_ns))
        worker.role, worker.billed_ns, worker.becomes = role, now_ns, None
        worker.virtual = VirtualWorker.make(worker.worker_id, worker.virtual.engine, role)
        self._routed.add(worker.virtual)

    def _is_idle(self, worker: _Worker) -> bool:
        load = self._load.of(worker.worker_id)
        return not load.active_requests and self._fleet.is_idle(worker.worker_id)

    def _exit(self, worker: _Worker, time_ns: int) -> None:
        ended_ns = max(time_ns, worker.billed_ns)
        self.spans.append(Span(worker.role, worker.billed_ns, ended_ns))
        del self._workers[worker.worker_id]
        if worker.virtual is not None:
            self._fleet.remove(worker.worker_id)
            self._routed.forget(worker.virtual)

"""A fleet in virtual time that carries out a planner's plans, without requests of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping

from attrs import define, evolve, field

from commutator.contract.planner import (
    Arrivals,
    EnginePerformance,
    Observation,
    PlannedWorker,
    WorkerPhase,
    length_bucket,
)
from commutator.contract.worker import Role
from commutator.planning import ActionKind, FleetPlanner, FleetState, Plan, PlanAction
from commutator_slo.config import SloConfig
from commutator_slo.growth import Growth
from commutator_slo.need import NeedOf
from commutator_slo.pipeline import Pipeline, PipelineState

__all__ = ["SIM", "FleetModel", "arrivals", "planner_of", "poisson_arrivals"]

SIM = EnginePerformance(
    prefill_tokens_per_s=8000.0,
    step_s=0.006,
    step_request_s=0.00035,
    max_running=256,
    max_step_tokens=2048,
    kv_tokens=262_144,
)
"""A `sim` worker with its default options."""


def planner_of(
    config: SloConfig,
    needs: NeedOf | None = None,
    *,
    roles: Collection[Role] = (Role.BOTH,),
    growth: Growth | None = None,
) -> FleetPlanner[PipelineState]:
    """What plans a fleet of such workers by the pipeline of `slo`."""
    pipeline = Pipeline(config, dict.fromkeys(roles, SIM), needs=needs, growth=growth)
    return FleetPlanner(config, roles, pipeline)


def arrivals(requests: int, prompt_tokens: int, window_s: float) -> Arrivals:
    """Evenly spread requests of one length."""
    return Arrivals(
        requests=requests,
        prompt_tokens=requests * prompt_tokens,
        context_tokens=requests * prompt_tokens,
        prompt_lengths={length_bucket(prompt_tokens): requests} if requests else {},
        gaps_squared_s2=window_s**2 / requests if requests else 0.0,
    )


def poisson_arrivals(
    rng: random.Random, rate_per_s: float, prompt_tokens: int, window_s: float
) -> Arrivals:
    """The arrivals of a Poisson process in a window."""
    time_s, squares, requests = 0.0, 0.0, 0
    while (gap_s := rng.expovariate(rate_per_s)) + time_s <= window_s:
        time_s += gap_s
        squares += gap_s * gap_s
        requests += 1
    return evolve(arrivals(requests, prompt_tokens, window_s), gaps_squared_s2=squares)


@define
class FleetModel:
    """Workers of one role: launches take their time, drains end at once."""

    planner: FleetPlanner[PipelineState]
    workers: int = 1
    start_up_s: Callable[[int], float | None] = lambda _: 120.0
    """By the number of the launch; None: it never becomes ready."""
    role: Role = Role.BOTH
    now_s: float = 0.0
    launches: int = 0
    cancelled: int = 0
    fleet: dict[str, PlannedWorker] = field(factory=dict)
    plans: list[Plan] = field(factory=list)
    _state: FleetState[PipelineState] = field(init=False)
    _ready_s: dict[str, float | None] = field(factory=dict)
    _started_s: list[float] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self._state = self.planner.begin()
        for number in range(self.workers):
            name = f"first-{number}"
            self.fleet[name] = PlannedWorker(
                worker_id=name, role=self.role, phase=WorkerPhase.READY, age_s=1e6
            )

    def tick(
        self,
        arrived: Arrivals | None,
        output_tokens: float = 150.0,
        attained: float | None = None,
    ) -> Plan:
        """Pass an interval in which ``arrived``, and ``attained`` of the first tokens were in time.

        Plan, and carry the plan out.
        """
        first = not self.plans
        if not first:
            self._pass(self.planner.config.interval_s)
        by_role: Mapping[Role, Arrivals] | None
        by_role = None if arrived is None else {self.role: arrived}
        seen = Observation(
            time_s=self.now_s,
            window_s=0.0 if first else self.planner.config.interval_s,
            arrivals=by_role,
            workers=list(self.fleet.values()),
            output_tokens=output_tokens,
            started_s=self._started_s,
            attained_ttft=attained,
        )
        self._started_s = []
        self._state, plan = self.planner.plan(self._state, seen)
        for action in plan.actions:
            self._do(action)
        self.plans.append(plan)
        return plan

    def desired(self) -> list[int]:
        """The workers of each plan."""
        return [plan.roles[self.role].desired for plan in self.plans]

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        for name, before in list(self.fleet.items()):
            worker = evolve(before, age_s=before.age_s + seconds)
            ready_s = self._ready_s.get(name)
            starting = worker.phase is WorkerPhase.STARTING
            self.fleet[name] = worker
            if starting and ready_s is not None and worker.age_s >= ready_s:
                self.fleet[name] = evolve(worker, phase=WorkerPhase.READY)
                self._started_s.append(ready_s)

    def _do(self, action: PlanAction) -> None:
        if action.kind is ActionKind.LAUNCH:
            name = f"launch-{self.launches}"
            self._ready_s[name] = self.start_up_s(self.launches)
            self.launches += 1
            self.fleet[name] = PlannedWorker(
                worker_id=name, role=self.role, phase=WorkerPhase.STARTING, age_s=0.0
            )
        else:
            assert action.worker_id is not None
            self.cancelled += action.kind is ActionKind.CANCEL
            del self.fleet[action.worker_id]

"""The loop of a planner: observes, asks for a plan, and has the fleet do what the plan says."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from attrs import frozen

from commutator.contract.planner import Observation, PlannedWorker
from commutator.contract.tuning import Tuning
from commutator.contract.worker import Role
from commutator.demand import DoorReport, DoorReports, Reported
from commutator.planning import ActionKind, FleetPlanner, FleetState, Plan, PlanAction
from commutator.supervisor.fleet import ActionResult, loaded
from commutator.supervisor.planner.plan_log import PlanLog

log = logging.getLogger(__name__)

_SOONEST_S = 0.5
"""Between two plans, also when a request waits for the first worker."""
_FORGOTTEN_S = 300.0
"""A planner that has not acted for this long begins anew: another one may have acted."""
_KEEP_EVERY_S = 300.0
_ADVISED = "only advised"


class PlannedFleet(Protocol):
    """Workers that a planner resizes; ``Fleet`` is one. Every method returns at once."""

    def workers(self) -> Sequence[PlannedWorker] | None: ...

    def take_start_ups(self) -> Sequence[float]: ...

    def launch(self, role: Role) -> ActionResult: ...

    def cancel(self, worker_id: str) -> ActionResult: ...

    def drain(self, worker_id: str) -> ActionResult: ...

    def undrain(self, worker_id: str) -> ActionResult: ...

    def set_role(self, worker_id: str, role: Role) -> ActionResult: ...


class SteadyClock:
    """A clock that does not go back, and passes at most ``most_s`` between two looks at it.

    A machine that was suspended, or a supervisor that stood still, must not make every start look
    overdue and every front door silent.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_s: float = 30.0) -> None:
        self._clock = clock
        self._most_s = most_s
        self._looked_s = clock()
        self._now_s = self._looked_s

    def __call__(self) -> float:
        now_s = self._clock()
        passed_s = now_s - self._looked_s
        self._looked_s = now_s
        self._now_s += min(max(0.0, passed_s), self._most_s)
        return self._now_s


@frozen(kw_only=True)
class Surroundings:
    """What a planner's loop observes and acts on."""

    fleet: PlannedFleet
    reports: DoorReports
    """What the front doors count."""
    may_act: Callable[[], bool] = lambda: True
    """Whether this planner is the only one that acts; see ``Claim.held``."""
    clock: Callable[[], float] = time.monotonic
    """That of ``fleet`` and ``reports``."""
    unix_clock: Callable[[], float] = time.time


class PlannerLoop:
    """Plans at each interval while it is the one that acts. Nothing in it waits for a worker."""

    def __init__(
        self, planner: FleetPlanner[Any], around: Surroundings, tuning: Tuning | None = None
    ) -> None:
        """``tuning`` tries values of options."""
        self._planner = planner
        self._config = planner.config
        self._around = around
        self._tuning = tuning
        self._state: FleetState[Any] | None = None
        self._known_s: float | None = None
        """When arrivals were last known."""
        self._planned_s: float | None = None
        self._plan: Plan | None = None
        self._acts = False
        self._wake = asyncio.Event()
        self.log = PlanLog(planner.config)

    async def run(self) -> None:
        """Plan until cancelled."""
        kept_s = self._around.clock()
        try:
            while True:
                self._wake.clear()
                try:
                    self.tick()
                except Exception:
                    log.exception("planning failed; the fleet stays as it is")
                if self._around.clock() - kept_s >= _KEEP_EVERY_S:
                    kept_s = self._around.clock()
                    await asyncio.to_thread(self.keep)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._config.interval_s):
                        await self._wake.wait()
        finally:
            self.keep()

    def keep(self) -> None:
        """Have the planner write down what the next start should know."""
        if self._state is not None:
            self._planner.keep(self._state)

    def report(self, report: DoorReport) -> None:
        """A front door has reported; a request that waits for a first worker is planned for now."""
        now_s = self._around.clock()
        self._around.reports.take(report, now_s)
        plan = self._plan
        if not report.waiting_requests or plan is None:
            return
        none = any(
            not one.ready + one.starting
            for role, one in plan.roles.items()
            if report.waiting_tokens.get(role)
        )
        if none and now_s - (self._planned_s or 0.0) >= _SOONEST_S:
            self._wake.set()

    def leave(self, door: str) -> None:
        """A front door has said that it stops."""
        self._around.reports.leave(door)

    def tick(self) -> Plan | None:
        """Plan and act now; None where another planner acts."""
        around = self._around
        now_s = around.clock()
        workers = around.fleet.workers() if around.may_act() else None
        acts = workers is not None
        if acts is not self._acts:
            self._acts = acts
            what = f"acts from now on (mode {self._config.mode})" if acts else "does not act"
            log.info("this planner %s", what)
        if workers is None:
            self._stand_by()
            return None
        began_s = time.perf_counter()
        if self._planned_s is not None:
            if now_s <= self._planned_s:
                return self._plan  # the clock stands still
            if now_s - self._planned_s > _FORGOTTEN_S:
                self._state = self._known_s = None
        if self._state is None:
            self._state = self._planner.begin()
        reported = around.reports.observe(now_s)
        seen = self._observe(now_s, workers, reported)
        self._state, plan = self._planner.plan(self._state, seen)
        results = [self._do(action) for action in plan.actions]
        self.log.planned(seen, plan, results, around.unix_clock())
        if self._tuning is not None:
            told = self._tuning.step(now_s, reported.arms, workers)
            self.log.tuned(told, self._tuning.status(), around.unix_clock())
        self._planned_s, self._plan = now_s, plan
        self.log.tick_s = time.perf_counter() - began_s
        return plan

    def _stand_by(self) -> None:
        """Another planner acts, or no worker is known yet."""
        if not self._around.reports.doors:
            # They report to the planner that acts now: what this one knew is of the past.
            self._state = self._known_s = None
        if self._tuning is not None:
            self._tuning.forget()

    def _observe(
        self, now_s: float, workers: Sequence[PlannedWorker], reported: Reported
    ) -> Observation:
        since_s = self._known_s
        window_s = 0.0 if since_s is None else now_s - since_s
        if reported.arrivals is not None:
            self._known_s = now_s
        return Observation(
            time_s=now_s,
            window_s=window_s,
            arrivals=reported.arrivals,
            workers=loaded(workers, reported.loads, reported.cached_blocks),
            output_tokens=reported.output_tokens,
            started_s=self._around.fleet.take_start_ups(),
            waiting_tokens=reported.waiting_tokens,
            waiting_requests=reported.waiting_requests,
            oldest_wait_s=reported.oldest_wait_s,
            attained_ttft=reported.attained_ttft,
            attained_itl=reported.attained_itl,
            measured=reported.measured,
        )

    def _do(self, action: PlanAction) -> ActionResult:
        if self._config.mode != "act":
            return ActionResult(False, _ADVISED)
        worker_id = action.worker_id or ""
        try:
            match action.kind:
                case ActionKind.LAUNCH:
                    result = self._around.fleet.launch(action.role)
                case ActionKind.CANCEL:
                    result = self._around.fleet.cancel(worker_id)
                case ActionKind.DRAIN:
                    result = self._around.fleet.drain(worker_id)
                case ActionKind.UNDRAIN:
                    result = self._around.fleet.undrain(worker_id)
                case ActionKind.SET_ROLE:
                    result = self._around.fleet.set_role(worker_id, action.role)
        except Exception as error:
            log.exception("%s %s failed", action.kind, worker_id or action.role)
            return ActionResult(False, f"failed: {error}")
        return result

    def status(self) -> dict[str, Any]:
        """What the planner wants and sees now, as plain data."""
        return self.log.status() | {
            "acts": self._acts,
            "tuning": None if self._tuning is None else self._tuning.status(),
        }

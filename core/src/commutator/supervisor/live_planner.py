"""The planner of a running deployment: observes, plans, and has its fleet do what the plan says."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

from commutator.contract.planner import (
    ActionKind,
    Observation,
    Plan,
    PlanAction,
    PlannedWorker,
    PlannerConfig,
)
from commutator.contract.service import Connection, Receiver, Service
from commutator.contract.worker import Role
from commutator.planner.explanation import changed_roles, explained, summary
from commutator.planner.pipeline import Planner, PlannerState
from commutator.planner.reports import DoorReport, DoorReports, Reported
from commutator.supervisor.fleet import ActionResult, loaded
from commutator.supervisor.planning import LearnedFile
from commutator.supervisor.tuning.live_tuning import LiveTuning

__all__ = ["SERVICE", "LivePlanner", "PlannedFleet", "PlannerService", "SteadyClock"]

log = logging.getLogger(__name__)

SERVICE = "planner"
"""The first word of each frame between front doors and planner."""

_EXPLAINED = 2000
"""Plans that are remembered in full."""
_HISTORY = 1000
"""Changes that are remembered."""
_RECENT = 8
"""Of them in the status, newest first."""
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


class LivePlanner:
    """Plans at each interval while it is the one that acts. Nothing in it waits for a worker."""

    def __init__(
        self,
        planner: Planner,
        config: PlannerConfig,
        fleet: PlannedFleet,
        reports: DoorReports,
        may_act: Callable[[], bool],
        clock: Callable[[], float],
        *,
        learned: LearnedFile | None = None,
        tuning: LiveTuning | None = None,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """``may_act``: whether this planner is the only one that acts; see ``Claim.held``.

        ``clock`` is that of ``fleet`` and ``reports``; ``learned`` keeps what is learned of
        workers' speed; ``tuning`` tries values of options.
        """
        self._learned = learned
        self._tuning = tuning
        self._planner = planner
        self._config = config
        self._fleet = fleet
        self._reports = reports
        self._may_act = may_act
        self._clock = clock
        self._unix_clock = unix_clock
        self._state: PlannerState | None = None
        self._known_s: float | None = None
        """When arrivals were last known."""
        self._planned_s: float | None = None
        self._plan: Plan | None = None
        self._desired: dict[Role, int] = {}
        self._acts = False
        self._wake = asyncio.Event()
        self._explained: deque[dict[str, Any]] = deque(maxlen=_EXPLAINED)
        self._history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self._actions: Counter[ActionKind] = Counter()
        self._plans = 0
        self._tick_s = 0.0
        self._warned: Sequence[str] = ()
        self.observed: deque[tuple[Observation, Plan]] = deque(maxlen=_EXPLAINED)
        """The latest observations, each with its plan."""

    async def run(self) -> None:
        """Plan until cancelled."""
        kept_s = self._clock()
        try:
            while True:
                self._wake.clear()
                try:
                    self.tick()
                except Exception:
                    log.exception("planning failed; the fleet stays as it is")
                if self._clock() - kept_s >= _KEEP_EVERY_S:
                    kept_s = self._clock()
                    await asyncio.to_thread(self.keep)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._config.interval_s):
                        await self._wake.wait()
        finally:
            self.keep()

    def keep(self) -> None:
        """Write what was learned of workers' speed, where that is to be kept."""
        state = self._state
        if self._learned is not None and state is not None:
            roles = state.roles.items()
            self._learned.write({role: one.speed.buckets for role, one in roles})

    def report(self, report: DoorReport) -> None:
        """A front door has reported; a request that waits for a first worker is planned for now."""
        now_s = self._clock()
        self._reports.take(report, now_s)
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

    def tick(self) -> Plan | None:
        """Plan and act now; None where another planner acts."""
        now_s = self._clock()
        workers = self._fleet.workers() if self._may_act() else None
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
            self._state = self._planner.begin(
                None if self._learned is None else self._learned.read()
            )
        reported = self._reports.observe(now_s)
        seen = self._observe(now_s, workers, reported)
        self._state, plan = self._planner.plan(self._state, seen)
        results = [self._do(action) for action in plan.actions]
        self._remember(seen, plan, results)
        if self._tuning is not None:
            self._tune(self._tuning, now_s, reported, workers)
        self._planned_s, self._plan = now_s, plan
        self._plans += 1
        self._tick_s = time.perf_counter() - began_s
        return plan

    def _stand_by(self) -> None:
        """Another planner acts, or no worker is known yet."""
        if not self._reports.doors:
            # They report to the planner that acts now: what this one knew is of the past.
            self._state = self._known_s = None
        if self._tuning is not None:
            self._tuning.forget()

    def _tune(
        self,
        tuning: LiveTuning,
        now_s: float,
        reported: Reported,
        workers: Sequence[PlannedWorker],
    ) -> None:
        for text in tuning.step(now_s, reported.arms, workers):
            self._history.append({"time": self._unix_clock(), "text": text})
            log.info("plan: %s", text)
        self._explained[-1]["tuning"] = tuning.status()

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
            started_s=self._fleet.take_start_ups(),
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
                    result = self._fleet.launch(action.role)
                case ActionKind.CANCEL:
                    result = self._fleet.cancel(worker_id)
                case ActionKind.DRAIN:
                    result = self._fleet.drain(worker_id)
                case ActionKind.UNDRAIN:
                    result = self._fleet.undrain(worker_id)
                case ActionKind.SET_ROLE:
                    result = self._fleet.set_role(worker_id, action.role)
        except Exception as error:
            log.exception("%s %s failed", action.kind, worker_id or action.role)
            return ActionResult(False, f"failed: {error}")
        self._actions[action.kind] += result.done
        return result

    # ----------------------------------------------------------------- for people

    def _remember(self, seen: Observation, plan: Plan, results: Sequence[ActionResult]) -> None:
        unix_s = self._unix_clock()
        texts = [result.text for result in results]
        self.observed.append((seen, plan))
        self._explained.append(explained(seen, plan, texts, unix_s))
        changes = changed_roles(self._desired, plan)
        for action, result in zip(plan.actions, results, strict=True):
            if result.done:
                changes.setdefault(action.role, 0)
        for role, change in changes.items():
            text = summary(change, role, plan, texts)
            self._history.append({"time": unix_s, "text": text})
            log.info("plan: %s", text)
        self._desired = {role: one.desired for role, one in plan.roles.items()}
        for warning in plan.warnings:
            if warning not in self._warned:
                self._history.append({"time": unix_s, "text": f"warning: {warning}"})
                log.warning("plan: %s", warning)
        self._warned = plan.warnings

    def status(self) -> dict[str, Any]:
        """What the planner wants and sees now, as plain data."""
        last = self._explained[-1] if self._explained else None
        return {
            "kind": self._config.kind,
            "mode": self._config.mode,
            "acts": self._acts,
            "interval_s": self._config.interval_s,
            "plans": self._plans,
            "tick_s": self._tick_s,
            "actions": {kind.value: self._actions[kind] for kind in ActionKind},
            "last": last,
            "tuning": None if self._tuning is None else self._tuning.status(),
            "recent": list(islice(reversed(self._history), _RECENT)),
        }

    def explain(self, unix_s: float | None = None) -> dict[str, Any] | None:
        """The last plan made until ``unix_s``, by default the last one; None where none is known.

        The latest plans are remembered.
        """
        plans = reversed(self._explained)
        return next((one for one in plans if unix_s is None or one["time"] <= unix_s), None)

    def history(self) -> list[dict[str, Any]]:
        """The latest changes and warnings, oldest first, each with its time and a line."""
        return list(self._history)


class PlannerService(Service):
    """Answers front doors, on the port of the registry.

    door -> planner                              planner -> door
    ["planner", "report", DoorReport]            ["planner", "status", {...}]
    ["planner", "leave", door]
    ["planner", "ask", number, question,         ["planner", "answer", number, value]
      seconds | nil]
    """

    name = SERVICE

    def __init__(self, planner: LivePlanner, reports: DoorReports) -> None:
        self._planner = planner
        self._reports = reports

    def connected(self, connection: Connection) -> Receiver:
        return _Door(self._planner, self._reports, connection)

    async def run(self) -> None:
        await self._planner.run()


class _Door(Receiver):
    """One connection of a front door. One that falls silent is forgotten later."""

    def __init__(self, planner: LivePlanner, reports: DoorReports, connection: Connection) -> None:
        self._planner = planner
        self._reports = reports
        self._send = connection.send
        self._answers: Mapping[str, Callable[[float | None], Any]] = {
            "status": lambda _: planner.status(),
            "explain": planner.explain,
            "history": lambda _: planner.history(),
        }

    def on_frame(self, frame: list[Any]) -> None:
        match frame:
            case [_, "report", packed]:
                self._planner.report(DoorReport.unpack(packed))
                self._send([SERVICE, "status", self._planner.status()])
            case [_, "leave", str(door)]:
                self._reports.leave(door)
            case [_, "ask", int(number), str(question), float() | int() | None as at] if (
                question in self._answers
            ):
                self._send([SERVICE, "answer", number, self._answers[question](at)])
            case _:
                raise ValueError("unknown frame")

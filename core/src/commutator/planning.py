"""From what a planner's policy wants to what is done: bounds, budget, and the cheapest steps. Pure.

State goes in and out, and time comes with the observation: a replay and a deployment run the same
code, and equal observations give equal plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from attrs import evolve, field, frozen

from commutator.contract.planner import (
    Observation,
    PlannedWorker,
    PlannerConfig,
    PlannerPolicy,
    Proposal,
    Sizing,
    WorkerPhase,
)
from commutator.contract.worker import Role

__all__ = [
    "ActionKind",
    "FleetPlanner",
    "FleetState",
    "Plan",
    "PlanAction",
    "RolePlan",
    "fleet_actions",
    "supply",
    "within",
]

StateT = TypeVar("StateT")

_OVERDUE = 3.0
"""A launch that takes this many times the usual start-up time is given up."""


# --------------------------------------------------------------------------- plans


class ActionKind(StrEnum):
    """What is done to a fleet, cheapest first."""

    UNDRAIN = "undrain"
    """Give a draining worker requests again."""
    CANCEL = "cancel"
    """End a worker that is not ready yet; one that is about to change its role keeps it."""
    SET_ROLE = "set_role"
    """Give a worker another role once it has no requests."""
    LAUNCH = "launch"
    """Start a worker."""
    DRAIN = "drain"
    """Give a worker no more requests and end it after the last one."""


@frozen(kw_only=True)
class PlanAction:
    """One step from the fleet as it is to the plan."""

    kind: ActionKind
    """What to do."""
    role: Role
    """The role of the worker; the new one if it changes."""
    worker_id: str | None
    """The worker; None for a launch."""


@frozen(kw_only=True)
class RolePlan:
    """The plan for one role, with what led to it."""

    desired: int
    """Workers that should be ready."""
    proposed: int | None
    """What the demand needs, as the policy says; None where that is not known."""
    ready: int
    """Workers that get requests."""
    starting: int
    """Workers that are expected to become ready."""
    draining: int
    """Workers that still answer their last requests."""
    reason: str
    """Why, in one line, for people: the policy's reason, then bounds and budget."""
    samples: int = 0
    """The number of measured stretches of time that how fast a worker is rests on, beside what its
    engine tells."""
    residual: float | None = None
    """How far measured times are from what that speed explains: 0.1 is 10 %. None: none is
    known."""


@frozen(kw_only=True)
class Plan:
    """One decision."""

    time_s: float
    """The time of its observation."""
    roles: Mapping[Role, RolePlan]
    """By role."""
    actions: Sequence[PlanAction] = ()
    """What to do now."""
    warnings: Sequence[str] = ()
    """What went wrong, and what no plan can help."""


# ------------------------------------------------------------------------ planning


@frozen(kw_only=True)
class FleetState(Generic[StateT]):
    """What is remembered from one plan to the next; never changed in place."""

    policy: StateT
    """Of the policy."""
    desired: Mapping[Role, int] = field(factory=dict)
    """Of the last plan."""
    given_up: Mapping[Role, int] = field(factory=dict)
    """Launches that it gave up."""


class FleetPlanner(Generic[StateT]):
    """Asks a policy, and plans what it wants within the bounds and the budget of ``config``."""

    def __init__(
        self, config: PlannerConfig, roles: Collection[Role], policy: PlannerPolicy[StateT]
    ) -> None:
        """``roles``: those that the fleet may have."""
        self.config = config
        self._roles = roles
        self._policy = policy

    def begin(self) -> FleetState[StateT]:
        """The state before the first observation."""
        return FleetState(policy=self._policy.begin())

    def keep(self, state: FleetState[StateT]) -> None:
        """Have the policy write down what the next start should know; may block."""
        self._policy.keep(state.policy)

    def plan(self, state: FleetState[StateT], seen: Observation) -> tuple[FleetState[StateT], Plan]:
        """The plan for an observation, which is later than the one before, and the next state.

        Where the policy raises, or leaves out a role, the last plan stays.
        """
        policy_state, sizing = self._asked(state, evolve(seen, given_up=state.given_up))
        start_up_s = sizing.start_up_s or self.config.start_up_s
        warnings = list(sizing.warnings)
        notes: dict[Role, list[str]] = {role: [one.reason] for role, one in sizing.roles.items()}
        wanted = {role: max(0, one.workers) for role, one in sizing.roles.items()}
        desired = within(self.config, wanted, notes, _in_use(seen))
        given_up: Mapping[Role, int] = {}
        actions: list[PlanAction] = []
        if seen.workers is not None:
            given_up, actions = fleet_actions(desired, seen.workers, start_up_s)
            warnings += [
                f"{late} {role} not ready after {_OVERDUE:g} times the usual {start_up_s:.0f} s, "
                "given up"
                for role, late in given_up.items()
            ]
        plans = {
            role: _role_plan(desired[role], one, [w for w in seen.workers or () if w.role is role],
                             notes[role])
            for role, one in sizing.roles.items()
        }  # fmt: skip
        plan = Plan(time_s=seen.time_s, roles=plans, actions=actions, warnings=warnings)
        return FleetState(policy=policy_state, desired=desired, given_up=given_up), plan

    def _asked(self, state: FleetState[StateT], seen: Observation) -> tuple[StateT, Sizing]:
        try:
            after, sizing = self._policy.propose(state.policy, seen)
            roles = {role: sizing.roles[role] for role in self._roles}
        except Exception as error:  # noqa: BLE001 - a policy's failure must not stop planning
            problem = f"{type(error).__name__}: {error}"
            return state.policy, self._as_before(state, seen, problem)
        return after, evolve(sizing, roles=roles)

    def _as_before(self, state: FleetState[StateT], seen: Observation, problem: str) -> Sizing:
        there = {
            role: len(supply(seen.workers or (), role, self.config.start_up_s))
            for role in self._roles
        }
        return Sizing(
            roles={
                role: Proposal(
                    workers=state.desired.get(role, there[role]), reason="as before", needed=None
                )
                for role in self._roles
            },
            warnings=[f"the policy failed, the last plan stays: {problem}"],
        )


def _in_use(seen: Observation) -> Collection[Role]:
    """The roles that have requests now, also such as wait for a first worker."""
    busy = {one.role for one in seen.workers or () if one.active_requests}
    return busy | {role for role, tokens in seen.waiting_tokens.items() if tokens}


def _role_plan(
    desired: int, one: Proposal, workers: Sequence[PlannedWorker], notes: Sequence[str]
) -> RolePlan:
    phases = Counter(worker.phase for worker in workers)
    return RolePlan(
        desired=desired,
        proposed=one.needed,
        ready=phases[WorkerPhase.READY],
        starting=phases[WorkerPhase.STARTING],
        draining=phases[WorkerPhase.DRAINING],
        reason="; ".join(dict.fromkeys(note for note in notes if note)),
        samples=one.samples,
        residual=one.residual,
    )


def within(
    config: PlannerConfig,
    wanted: Mapping[Role, int],
    notes: Mapping[Role, list[str]],
    in_use: Collection[Role] = (),
) -> dict[Role, int]:
    """``wanted`` within bounds and budget, which always hold; ``notes`` are told what that changed.

    Roles that are ``in_use`` keep a worker also where their bounds begin at 0.
    """
    counts = {}
    floors = {}
    for role in wanted:
        fewest, most = config.bounds.of(role)
        floor = fewest or min(most, int(role in in_use))
        counts[role] = min(max(wanted[role], floor), most)
        floors[role] = floor
        if counts[role] > wanted[role]:
            why = "bounds" if fewest else "recent use"
            notes[role].append(f"{counts[role]} by {why}")
        elif counts[role] < wanted[role]:
            notes[role].append(f"{counts[role]} by bounds")
    most_workers = config.budget.workers
    if most_workers is None or sum(counts.values()) <= most_workers:
        return counts
    before = dict(counts)
    while sum(counts.values()) > most_workers:
        above = [role for role in counts if counts[role] > floors[role]]
        # Below the floors only where the floors themselves exceed the budget.
        able = above or [role for role in counts if counts[role]]
        # The role that is left the most of what it had gives next, so that shares stay equal.
        counts[max(able, key=lambda role: (counts[role] / before[role], before[role]))] -= 1
    for role, count in counts.items():
        if count < before[role]:
            notes[role].append(f"{count} by the budget of {most_workers} workers")
    return counts


# ------------------------------------------------------------------------- actions


def fleet_actions(
    desired: Mapping[Role, int], workers: Sequence[PlannedWorker], start_up_s: float
) -> tuple[Mapping[Role, int], list[PlanAction]]:
    """How roles get to ``desired`` workers, cheapest actions first.

    Also returns the number of launches of each role that are given up, because they take more than
    three times ``start_up_s``.
    """
    given_up: dict[Role, int] = {}
    missing: dict[Role, int] = {}
    leaving: list[PlannedWorker] = []
    actions: list[PlanAction] = []
    for role, wanted in desired.items():
        mine = [one for one in workers if one.role is role]
        there = supply(mine, role, start_up_s)
        late = [
            one
            for one in mine
            if one.phase is WorkerPhase.STARTING and one not in there and not one.held
        ]
        if late:
            given_up[role] = len(late)
        actions += [_act(ActionKind.CANCEL, one) for one in late]
        missing[role] = wanted - len(there)
        if missing[role] > 0:
            back = [one for one in mine if one.phase is WorkerPhase.DRAINING and not one.held]
            back.sort(key=lambda one: (-one.active_requests, -one.cached_blocks, one.worker_id))
            actions += [_act(ActionKind.UNDRAIN, one) for one in back[: missing[role]]]
            missing[role] -= min(missing[role], len(back))
        elif missing[role] < 0:
            leaving += _leaving([one for one in there if not one.held], -missing[role])
    for role, count in missing.items():
        for _ in range(count):
            able = [
                one for one in leaving if one.phase is WorkerPhase.READY and role in one.may_become
            ]
            if able:
                chosen = min(able, key=_loss)
                leaving.remove(chosen)
                actions.append(_act(ActionKind.SET_ROLE, evolve(chosen, role=role)))
            else:
                actions.append(PlanAction(kind=ActionKind.LAUNCH, role=role, worker_id=None))
    for one in leaving:
        starts = one.phase is WorkerPhase.STARTING
        actions.append(_act(ActionKind.CANCEL if starts else ActionKind.DRAIN, one))
    return given_up, actions


def supply(workers: Sequence[PlannedWorker], role: Role, start_up_s: float) -> list[PlannedWorker]:
    """The workers that are ready, or are starting and not overdue."""
    return [
        one
        for one in workers
        if one.role is role
        and (
            one.phase is WorkerPhase.READY
            or (one.phase is WorkerPhase.STARTING and one.age_s <= _OVERDUE * start_up_s)
        )
    ]


def _leaving(supply: Sequence[PlannedWorker], count: int) -> Sequence[PlannedWorker]:
    """The youngest launches; then the workers that lose least."""
    starting = [one for one in supply if one.phase is WorkerPhase.STARTING]
    starting.sort(key=lambda one: (one.age_s, one.worker_id))
    ready = [one for one in supply if one.phase is WorkerPhase.READY]
    return [*starting, *sorted(ready, key=_loss)][:count]


def _loss(worker: PlannedWorker) -> tuple[int, int, str]:
    """What is lost when a worker stops what it does."""
    return worker.active_requests, worker.cached_blocks, worker.worker_id


def _act(kind: ActionKind, worker: PlannedWorker) -> PlanAction:
    return PlanAction(kind=kind, role=worker.role, worker_id=worker.worker_id)

"""Sizes a fleet by the requests in flight, as a horizontal pod autoscaler does."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import frozen

from commutator import Fraction, PositiveInt, Seconds, hookimpl, setting
from commutator.contract.planner import (
    Observation,
    PlannerConfig,
    PlannerContext,
    PlannerPolicy,
    Proposal,
    Sizing,
    WorkerPhase,
)
from commutator.contract.registration import PlannerRegister
from commutator.contract.worker import Role


@frozen(kw_only=True)
class HpaConfig(PlannerConfig):
    requests_per_worker: PositiveInt = setting("Requests in flight at each worker.", 8)
    tolerance: Fraction = setting("A ratio so close to 1 changes nothing.", 0.1)
    stabilization_s: Seconds = setting(
        "The fleet shrinks to the largest number that was wanted in this time.", 300.0
    )


History = tuple[tuple[float, int], ...]
"""The numbers of workers that were wanted of late, each with its time."""


class Hpa(PlannerPolicy[Mapping[Role, History]]):
    def __init__(self, config: HpaConfig, context: PlannerContext) -> None:
        self._config = config
        self._roles = context.performance

    def begin(self) -> Mapping[Role, History]:
        return dict.fromkeys(self._roles, ())

    def propose(
        self, state: Mapping[Role, History], seen: Observation
    ) -> tuple[Mapping[Role, History], Sizing]:
        since_s = seen.time_s - self._config.stabilization_s
        after: dict[Role, History] = {}
        roles: dict[Role, Proposal] = {}
        for role, history in state.items():
            wanted, reason = self._wanted(role, seen)
            kept = [one for one in history if one[0] > since_s]
            after[role] = (*kept, (seen.time_s, wanted))
            roles[role] = Proposal(workers=max(n for _, n in after[role]), reason=reason)
        return after, Sizing(roles=roles)

    def _wanted(self, role: Role, seen: Observation) -> tuple[int, str]:
        mine = [one for one in seen.workers or () if one.role is role]
        now = sum(one.phase is not WorkerPhase.DRAINING for one in mine)
        active = sum(one.active_requests for one in mine)
        wanted = active / self._config.requests_per_worker
        is_close = now > 0 and abs(wanted / now - 1) <= self._config.tolerance
        return now if is_close else math.ceil(wanted), f"{active} requests in flight"


@hookimpl
def planner_register(register: PlannerRegister) -> None:
    register("hpa", HpaConfig, Hpa)

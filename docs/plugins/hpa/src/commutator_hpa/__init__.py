"""Sizes a fleet by the requests in flight, as a horizontal pod autoscaler does."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import frozen

from commutator import Fraction, PositiveInt, hookimpl, setting
from commutator.contract.planner import PlannerConfig, PlannerPolicy, Proposal, Situation
from commutator.contract.registration import PlannerRegister
from commutator.contract.worker import Role


@frozen(kw_only=True)
class HpaConfig(PlannerConfig):
    requests_per_worker: PositiveInt = setting("Requests in flight at each worker.", 8)
    tolerance: Fraction = setting("A ratio so close to 1 changes nothing.", 0.1)


class Hpa(PlannerPolicy):
    def __init__(self, config: HpaConfig) -> None:
        self._config = config

    def propose(self, situation: Situation) -> Mapping[Role, Proposal]:
        return {role: self._proposal(role, situation) for role in situation.demands}

    def _proposal(self, role: Role, situation: Situation) -> Proposal:
        active, now = situation.demands[role].active_requests, situation.supply[role]
        wanted = active / self._config.requests_per_worker
        is_close = now > 0 and abs(wanted / now - 1) <= self._config.tolerance
        workers = now if is_close else math.ceil(wanted)
        return Proposal(workers=workers, reason=f"{active} requests in flight")


@hookimpl
def planner_register(register: PlannerRegister) -> None:
    register("hpa", HpaConfig, Hpa)

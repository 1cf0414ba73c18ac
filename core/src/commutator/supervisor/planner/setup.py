"""Puts the planner of a deployment together, and says why one cannot plan it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import asdict

from commutator.config.model import Config
from commutator.contract.planner import (
    EnginePerformance,
    PlannerBounds,
    PlannerConfig,
    PlannerContext,
)
from commutator.contract.tuning import Tuning, TuningContext
from commutator.contract.worker import Role
from commutator.planning import FleetPlanner
from commutator.plugins import PluginHost

_OF_A_FLEET = frozenset({"name", "role", "replicas"})
"""Options of an engine that say nothing of one worker's speed."""


def planner_problems(config: Config, host: PluginHost) -> Iterator[str]:
    """Why the section `planner` cannot plan these engines, as "OPTION: what is wrong"."""
    planner = config.planner
    if planner is None:
        return
    if len(models := {engine.model for engine in config.engines}) > 1:
        yield f"planner: plans the workers of one model, and the engines serve {len(models)}"
    roles = {Role(engine.role) for engine in config.engines}
    if Role.BOTH in roles and Role.DECODE in roles:
        yield "engines: a plan needs one role that answers: both or decode, not the two"
    for role in Role:
        if role not in roles and planner.bounds.of(role) != PlannerBounds().of(role):
            yield f"planner.bounds.{role}: no entry of `engines` has this role"
    fewest = {role: planner.bounds.of(role)[0] for role in roles}
    budget = planner.budget.workers
    if budget is not None and sum(fewest.values()) > budget:
        yield f"planner.budget.workers: {budget} is less than the {sum(fewest.values())} of bounds"
    if fewest.get(Role.PREFILL) == 0:
        yield (
            "planner.bounds.prefill: set the fewest to 1 or more, such as [1, 8]: without a "
            "prefill worker, nobody asks the disaggregation policy who would need one"
        )
    wait_s = config.router.busy.max_queue_s
    if config.scales_from_zero and wait_s < planner.start_up_s:
        yield (
            f"planner.bounds.{config.serving_role}: begin at 0, and a request that waits for the "
            f"first worker would be refused after router.busy.max_queue_s ({wait_s:g}), before "
            f"one has started (planner.start_up_s, {planner.start_up_s:g}); set it above, together "
            "with a threshold such as router.busy.max_active_requests"
        )
    yield from (f"planner.{problem}" for problem in planner.problems(planner_context(config, host)))
    if planner.tuning is not None and planner.tuning.mode != "off":
        yield from (f"planner.tuning{problem}" for problem in planner.tuning.problems(config))


def make_planner(config: Config, planner: PlannerConfig, host: PluginHost) -> FleetPlanner[Any]:
    """The planner of a configuration without problems."""
    context = planner_context(config, host)
    policy = host.planners.kinds[planner.kind].thing(planner, context)
    return FleetPlanner(planner, context.performance, policy)


def make_tuning(planner: PlannerConfig, host: PluginHost, context: TuningContext) -> Tuning | None:
    """What tunes options for a planner; None where nothing does."""
    wanted = planner.tuning
    if wanted is None or wanted.mode == "off":
        return None
    return host.tunings.kinds[wanted.kind].thing(wanted, context)


def planner_context(config: Config, host: PluginHost) -> PlannerContext:
    """What a planner knows about the workers of a configuration."""
    performance: dict[Role, EnginePerformance | None] = {}
    for engine in config.engines:
        speed = host.engines.kinds[engine.kind].thing.performance(engine)
        role = Role(engine.role)
        performance[role] = performance.get(role) or speed
    return PlannerContext(performance=performance, fingerprints=_fingerprints(config))


def _fingerprints(config: Config) -> Mapping[Role, str]:
    """For each role, what the speed of its workers depends on, as a hash."""
    sources = {model.name: model.source for model in config.models}
    keys: dict[Role, str] = {}
    for engine in config.engines:
        options = asdict(engine, filter=lambda field, _: field.name not in _OF_A_FLEET)
        source = sources.get(engine.model) if engine.model else sorted(sources.values())
        told: list[Any] = [source, engine.kind, sorted(options.items())]
        keys.setdefault(Role(engine.role), hashlib.sha256(repr(told).encode()).hexdigest())
    return keys

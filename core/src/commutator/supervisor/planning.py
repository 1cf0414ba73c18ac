"""Puts the planner of a deployment together, and says why one cannot plan it."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from attrs import asdict, frozen

from commutator.config.model import Config
from commutator.contract.planner import (
    EnginePerformance,
    Forecaster,
    PlannerBounds,
    PlannerConfig,
    SampleSums,
)
from commutator.contract.worker import Role
from commutator.planner.pipeline import Planner, no_growth
from commutator.plugins import PluginHost

__all__ = ["LearnedFile", "machine", "make_planner", "planner_problems", "speed_keys"]

log = logging.getLogger(__name__)

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
    for role in sorted(roles - set(_performance(config, planner, host))):
        yield (
            f"planner.performance: required, as the engine of the {role} workers does not tell how "
            "fast one is; serve it without `planner`, and `commutator planner profile` measures it"
        )


def make_planner(config: Config, planner: PlannerConfig, host: PluginHost) -> Planner:
    """The planner of a configuration without problems."""
    wanted = planner.forecaster
    forecaster: Forecaster[Any] = no_growth()
    if wanted is not None:
        forecaster = host.forecasters.kinds[wanted.kind].thing(wanted)
    policy = host.planners.kinds[planner.kind].thing(planner)
    constraints = [host.constraints.kinds[one.kind].thing(one) for one in planner.constraints]
    performance = _performance(config, planner, host)
    return Planner(planner, performance, policy, forecaster, constraints)


def _performance(
    config: Config, planner: PlannerConfig, host: PluginHost
) -> Mapping[Role, EnginePerformance]:
    """How fast a worker of each role is, as far as it is known."""
    found: dict[Role, EnginePerformance] = {}
    for engine in config.engines:
        role = Role(engine.role)
        if planner.performance is not None:
            speed: EnginePerformance | None = planner.performance.performance()
        else:
            speed = host.engines.kinds[engine.kind].thing.performance(engine)
        if speed is not None:
            found.setdefault(role, speed)
    return found


@frozen(kw_only=True)
class _Kept:
    key: str
    """Of model, engine and machine."""
    buckets: Mapping[int, SampleSums]


class LearnedFile:
    """The file named by `planner.learned_file`.

    It is JSON: for each role the samples, and a key of what they were measured at. Samples of
    another model, engine or machine are not read.
    """

    def __init__(self, path: Path, keys: Mapping[Role, str]) -> None:
        self._path = path
        self._keys = keys

    def read(self) -> Mapping[Role, Mapping[int, SampleSums]]:
        """What was kept; nothing where the file is not there or cannot be read."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=dict[Role, _Kept])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("planner.learned_file: %s cannot be read: %s", self._path, error)
            return {}
        return {role: one.buckets for role, one in kept.items() if one.key == self._keys.get(role)}

    def write(self, learned: Mapping[Role, Mapping[int, SampleSums]]) -> None:
        """Keep it in the place of what was there; logs what goes wrong."""
        kept = {
            role.value: _Kept(key=self._keys[role], buckets=buckets)
            for role, buckets in learned.items()
        }
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            draft.write_bytes(msgspec.json.encode(kept))
            draft.replace(self._path)
        except OSError as error:
            log.warning("planner.learned_file: %s cannot be written: %s", self._path, error)


def speed_keys(config: Config, machine: str) -> Mapping[Role, str]:
    """For each role, what the speed of its workers depends on, as a hash."""
    sources = {model.name: model.source for model in config.models}
    keys: dict[Role, str] = {}
    for engine in config.engines:
        options = asdict(engine, filter=lambda field, _: field.name not in _OF_A_FLEET)
        source = sources.get(engine.model) if engine.model else sorted(sources.values())
        told: list[Any] = [machine, source, engine.kind, sorted(options.items())]
        keys.setdefault(Role(engine.role), hashlib.sha256(repr(told).encode()).hexdigest())
    return keys


def machine() -> str:
    """This machine's kind: its processors and their number."""
    models: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return f"{platform.machine()} {os.cpu_count()} {sorted(models)}"

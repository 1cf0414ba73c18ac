"""The planner kind `slo`: puts its pipeline together, and keeps what that has learned."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import msgspec
from attrs import frozen

from commutator import hookimpl
from commutator.contract.planner import EnginePerformance, PlannerContext, SampleSums
from commutator.contract.registration import PlannerRegister
from commutator.contract.worker import Role
from commutator_slo.config import SloConfig
from commutator_slo.growth import Growth
from commutator_slo.pipeline import Pipeline, PipelineState

log = logging.getLogger(__name__)


class Slo(Pipeline):
    """The fewest workers that keep waiting times within the targets."""

    def __init__(
        self,
        config: SloConfig,
        context: PlannerContext,
        *,
        growth: Growth | None = None,
    ) -> None:
        """``growth``: instead of that of the options. ``config`` has no problems."""
        if growth is None and config.forecaster is not None:
            growth = Growth(config.forecaster)
        super().__init__(config, _performance(config, context), growth=growth)
        self._file: LearnedFile | None = None
        if config.learned_file is not None and context.fingerprints:
            keys = {role: f"{machine()} {one}" for role, one in context.fingerprints.items()}
            self._file = LearnedFile(Path(config.learned_file).expanduser(), keys)

    def begin(
        self, learned: Mapping[Role, Mapping[int, SampleSums]] | None = None
    ) -> PipelineState:
        """By default with what the last run had learned."""
        if learned is None and self._file is not None:
            learned = self._file.read()
        return super().begin(learned)

    def keep(self, state: PipelineState) -> None:
        if self._file is not None:
            self._file.write({role: one.speed.buckets for role, one in state.roles.items()})


def _performance(config: SloConfig, context: PlannerContext) -> Mapping[Role, EnginePerformance]:
    """How fast a worker of each role is."""
    if config.performance is not None:
        return dict.fromkeys(context.performance, config.performance.performance())
    return {role: told for role, told in context.performance.items() if told is not None}


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


def machine() -> str:
    """This machine's kind: its processors and their number."""
    models: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return f"{platform.machine()} {os.cpu_count()} {sorted(models)}"


@hookimpl
def planner_register(register: PlannerRegister) -> None:
    register("slo", SloConfig, Slo)

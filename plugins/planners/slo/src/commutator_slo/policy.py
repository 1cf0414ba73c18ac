"""The planner kind `slo`: puts its pipeline together, and keeps what that has learned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commutator.contract.planner import EnginePerformance, PlannerContext, SampleSums
from commutator.contract.worker import Role
from commutator_slo.config import SloConfig
from commutator_slo.growth import Growth
from commutator_slo.learned_file import LearnedFile, machine
from commutator_slo.need import QueueingNeed
from commutator_slo.pipeline import Pipeline, PipelineState, no_growth
from commutator_slo.ratio import Ratio
from commutator_slo.situation import Forecaster

__all__ = ["Slo", "forecaster_of"]


class Slo(Pipeline):
    """The fewest workers that keep waiting times within the targets."""

    def __init__(
        self,
        config: SloConfig,
        context: PlannerContext,
        *,
        forecaster: Forecaster[Any] | None = None,
    ) -> None:
        """``forecaster``: instead of that of the options. ``config`` has no problems."""
        super().__init__(
            config,
            _performance(config, context),
            QueueingNeed(config),
            forecaster_of(config) if forecaster is None else forecaster,
            [Ratio(one) for one in config.constraints],
        )
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


def forecaster_of(config: SloConfig) -> Forecaster[Any]:
    """The forecaster of the options; one that expects no growth where they have none."""
    return no_growth() if config.forecaster is None else Growth(config.forecaster)


def _performance(config: SloConfig, context: PlannerContext) -> Mapping[Role, EnginePerformance]:
    """How fast a worker of each role is."""
    if config.performance is not None:
        return dict.fromkeys(context.performance, config.performance.performance())
    return {role: told for role, told in context.performance.items() if told is not None}

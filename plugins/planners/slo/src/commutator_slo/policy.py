"""The planner kind `slo`: puts its pipeline together, and keeps what that has learned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from commutator.contract.planner import EnginePerformance, PlannerContext, SampleSums
from commutator.contract.worker import Role
from commutator_slo.config import SloConfig
from commutator_slo.growth import Growth
from commutator_slo.learned_file import LearnedFile, machine
from commutator_slo.pipeline import Pipeline, PipelineState

__all__ = ["Slo"]


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

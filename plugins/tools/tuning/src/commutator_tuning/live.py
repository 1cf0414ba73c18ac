"""Tunes the options of a running deployment: the shell of the pure ``Tuner``."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict

from commutator.contract.planner import PlannedWorker, WorkerPhase
from commutator.contract.tuning import ArmCounts, Tuning
from commutator.contract.worker import Role
from commutator_tuning.config import TrialsConfig
from commutator_tuning.tuner import (
    Finding,
    Tuner,
    TuningSeen,
    TuningState,
    TuningStep,
    TuningStepKind,
)

log = logging.getLogger(__name__)


ValueSearch = Callable[
    [TrialsConfig, Mapping[str, float], Mapping[Role, int]], Coroutine[Any, Any, Finding]
]
"""Finds out by replays which values are better, given the present ones and the workers by role."""


class LiveTuning(Tuning):
    """Takes a step with each plan. Searches run by themselves; nothing here waits for one."""

    def __init__(self, config: TrialsConfig, tuner: Tuner, search: ValueSearch) -> None:
        self._config = config
        self._tuner = tuner
        self._search = search
        self._file = None if config.state_file is None else Path(config.state_file)
        self._searching: asyncio.Task[Finding] | None = None
        self._steps: Counter[TuningStepKind] = Counter()
        self._state: TuningState | None = None
        self._last: TuningStep | None = None

    def step(
        self,
        now_s: float,
        arms: Mapping[int, tuple[ArmCounts, ArmCounts]],
        workers: Sequence[PlannedWorker],
    ) -> Sequence[str]:
        told: list[str] = []
        state = self._state
        if state is None:
            state, told = self._restored()
        fleet = Counter(f"{one.role} {one.phase}" for one in workers)
        seen = TuningSeen(
            arms=arms.get(0 if state.trial is None else state.trial.number),
            fleet=fleet,
            steady=all(one.phase is WorkerPhase.READY or one.held for one in workers),
            finding=self._found(),
        )
        before = state
        state, step = self._tuner.step(state, seen, now_s)
        if (state.trial, state.values) != (before.trial, before.values) or told:
            self._keep(state)
        self._state = state
        if step.search:
            ready = Counter(one.role for one in workers if one.phase is WorkerPhase.READY)
            values = dict(state.values)
            self._searching = asyncio.create_task(self._search(self._config, values, ready))
        if step.kind is not None:
            self._steps[step.kind] += 1
            self._last = step
            told.append(f"{step.kind.value.replace('_', ' ')}: {step.text}")
        return [f"tuning, {line}" for line in told]

    def forget(self) -> None:
        self._state = None
        if self._searching is not None:
            self._searching.cancel()
            self._searching = None

    def status(self) -> dict[str, Any]:
        state = TuningState() if self._state is None else self._state
        trial = state.trial
        return {
            "mode": self._config.mode,
            "values": dict(state.values),
            "trial": None if trial is None else asdict(trial),
            "arms": None if trial is None else [asdict(one) for one in state.arms],
            "searching": state.searching,
            "options": self._tuner.values(state),
            "steps": {kind.value: self._steps[kind] for kind in TuningStepKind},
            "last": None if self._last is None else self._last.text,
        }

    def _found(self) -> Finding | None:
        """The result of a search that has ended."""
        task = self._searching
        if task is None or not task.done():
            return None
        self._searching = None
        try:
            return task.result()
        except Exception as error:
            log.exception("the search for better values failed")
            return Finding(problem=f"the search failed: {error}")

    def _restored(self) -> tuple[TuningState, list[str]]:
        """The state that the file keeps, and what is to be told of it."""
        if self._file is None:
            return TuningState(), []
        try:
            state, told = self._tuner.restored(json.loads(self._file.read_text()))
        except FileNotFoundError:
            return TuningState(), []
        except (OSError, ValueError) as error:
            log.exception("planner.tuning.state_file: %s cannot be used", self._file)
            return TuningState(), [f"{self._file} cannot be used, so nothing is tuned yet: {error}"]
        values = ", ".join(f"{option}={value:g}" for option, value in state.values.items())
        return state, [*told, f"as before: {values}"] if values else list(told)

    def _keep(self, state: TuningState) -> None:
        """Write the state down, so that a restart knows the values, and which trial to end."""
        if self._file is None:
            return
        draft = self._file.with_suffix(".draft")
        try:
            draft.write_text(json.dumps(self._tuner.kept(state)))
            draft.replace(self._file)  # atomically, so that a crash leaves the one or the other
        except OSError as error:
            log.warning("planner.tuning.state_file: %s cannot be written: %s", self._file, error)

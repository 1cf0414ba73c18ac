"""Tuning `trials`: values are found by replays of recorded requests, and tried on some of them."""

from __future__ import annotations

from commutator import hookimpl
from commutator.config.tunable import tunable_options
from commutator.contract.registration import TuningRegister
from commutator.contract.tuning import TuningContext
from commutator_tuning.config import TrialsConfig
from commutator_tuning.live import LiveTuning
from commutator_tuning.search import PolicySearch
from commutator_tuning.tuner import Tuner

__all__ = ["TrialsConfig"]


def _make(config: TrialsConfig, context: TuningContext) -> LiveTuning:
    search = PolicySearch(context.config, context.launcher, context.folder)
    return LiveTuning(config, Tuner(config, tunable_options(context.config)), search.search)


@hookimpl
def tuning_register(register: TuningRegister) -> None:
    register("trials", TrialsConfig, _make)

"""The process of one `sim` worker."""

from __future__ import annotations

import os
import sys

from commutator.tokenizer import load_text_model
from commutator_engine_kit import EngineStart, run_engine_process
from commutator_sim.config import SimConfig
from commutator_sim.engine import SimEngine


def build(config: SimConfig, start: EngineStart) -> SimEngine:
    """Make the engine; it uses only the model's name, tokenizer and context length."""
    if config.time_factor == 0:
        _run_as_batch()
    model = start.model
    text = load_text_model(model.source)
    max_model_len = model.max_model_len or text.max_model_len
    return SimEngine(
        config, model=model.name, max_model_len=max_model_len, text=text, host=start.host
    )


def _run_as_batch() -> None:
    """At unlimited speed nothing is late, and a real engine would not use this CPU."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if __name__ == "__main__":
    run_engine_process(SimConfig, build)

"""The engine's process; `commutator serve` starts it."""

from __future__ import annotations

from commutator_encoder.config import EncoderConfig
from commutator_encoder.engine import EncoderEngine
from commutator_engine_kit import run_engine_process

if __name__ == "__main__":
    run_engine_process(EncoderConfig, EncoderEngine.of)

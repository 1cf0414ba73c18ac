"""The engine's process; `commutator serve` starts it."""

from __future__ import annotations

from commutator_engine_kit import run_engine_process
from commutator_reference.config import ReferenceConfig
from commutator_reference.server import ReferenceServer

if __name__ == "__main__":
    run_engine_process(ReferenceConfig, ReferenceServer)

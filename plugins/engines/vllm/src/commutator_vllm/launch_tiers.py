"""How a launched vLLM server gets the configured storage tiers: its `--kv-transfer-config`."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import attrs

from commutator import LaunchContext
from commutator.errors import ConfigError
from commutator_vllm.config import VllmConfig

__all__ = ["check_tiers", "tiers_connector"]

_LOOK = (
    "import sys; from importlib.util import find_spec; sys.exit(not find_spec('commutator_vllm'))"
)


def check_tiers(config: VllmConfig, python: str) -> None:
    """Raises ConfigError when the tiers would be ignored, or cannot be loaded."""
    problem = None
    if config.takes_part_in_handovers:
        problem = "a server with a connector of its own (`role`, or in `args`) has none"
    elif "--no-enable-prefix-caching" in config.args:
        problem = "nothing is reused with --no-enable-prefix-caching"
    elif subprocess.run([python, "-c", _LOOK], check=False).returncode:  # noqa: S603
        problem = (
            f"{python} does not have our plugins: install commutator-vllm and the packages of the "
            "tiers in that environment, as `make vllm` does"
        )
    if problem is not None:
        raise ConfigError([f"tiers: {problem}"], f"engine {config.name or config.kind}")


def tiers_connector(context: LaunchContext) -> dict[str, Any]:
    """Writes the tiers into a file of the worker's: the command line tells nothing about them."""
    file = context.state_dir / "tiers.json"
    file.write_text(json.dumps({"tiers": [attrs.asdict(tier) for tier in context.tiers]}))
    return {
        "kv_connector": "CommutatorConnector",
        "kv_connector_module_path": "commutator_vllm.kv_connector",
        "kv_role": "kv_both",
        # A block was damaged, a store is down: it is computed instead.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": str(file), "worker": context.worker_id},
    }

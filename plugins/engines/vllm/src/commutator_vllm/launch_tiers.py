"""What a launched vLLM server keeps in tiers and hands over: its `--kv-transfer-config`."""

from __future__ import annotations

from typing import Any

from commutator import LaunchContext
from commutator.engine import missing_plugin, write_tiers
from commutator.errors import ConfigError
from commutator_vllm.config import KV_TRANSFER, VllmConfig

__all__ = ["check_tiers", "kv_connector"]

# A prefill server is lost, a block was damaged, a store is down: it is computed instead.
_RECOMPUTE = {"kv_load_failure_policy": "recompute"}


def check_tiers(config: VllmConfig, python: str) -> None:
    """Raises ConfigError when the tiers would be ignored, or cannot be loaded."""
    problem = None
    if config.has_own_connector:
        problem = f"a server with {KV_TRANSFER} in its `args` has that connector only"
    elif "--no-enable-prefix-caching" in config.args:
        problem = "nothing is reused with --no-enable-prefix-caching"
    else:
        problem = missing_plugin(python, "commutator-vllm", "make vllm")
    if problem is not None:
        raise ConfigError([f"tiers: {problem}"], f"engine {config.name or config.kind}")


def kv_connector(config: VllmConfig, context: LaunchContext) -> dict[str, Any] | None:
    """The server's connector; None when it needs none."""
    connectors = []
    if context.tiers:  # first, so that its build of NIXL is the one that both have
        connectors.append(_tiers_connector(context))
    if config.role != "both":
        role = "kv_producer" if config.role == "prefill" else "kv_consumer"
        connectors.append({"kv_connector": "NixlConnector", "kv_role": role, **_RECOMPUTE})
    if not connectors:
        return None
    if len(connectors) == 1:
        return connectors[0]
    # The first one that has a request's tokens loads them, and both keep what was computed.
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        **_RECOMPUTE,
        "kv_connector_extra_config": {"connectors": connectors},
    }


def _tiers_connector(context: LaunchContext) -> dict[str, Any]:
    """Writes the tiers into a file of the worker's."""
    file = write_tiers(context)
    return {
        "kv_connector": "CommutatorConnector",
        "kv_connector_module_path": "commutator_vllm.kv_connector",
        "kv_role": "kv_both",
        **_RECOMPUTE,
        "kv_connector_extra_config": {"tiers": str(file), "worker": context.worker_id},
    }

"""How a launched TensorRT-LLM server gets the configured storage tiers."""

from __future__ import annotations

from commutator import LaunchContext
from commutator.engine import write_tiers
from commutator.errors import ConfigError
from commutator_trtllm.config import TrtllmConfig
from commutator_trtllm.kv_options import PREFIX

__all__ = ["check_tiers", "tiers_environment"]


def check_tiers(config: TrtllmConfig) -> None:
    """Raises ConfigError when the tiers would be ignored, or meet what they were not made for."""
    problem = None
    if config.takes_part_in_handovers:
        problem = (
            "a server that hands over KV (`role`, `cache_transceiver_config`) has no tiers: "
            "TensorRT-LLM itself warns of both together"
        )
    elif "kv_connector_config" in config.options:
        problem = "`options` names a KV connector already; leave out one of the two"
    if problem is not None:
        raise ConfigError([f"tiers: {problem}"], f"engine {config.name or config.kind}")


def tiers_environment(context: LaunchContext) -> dict[str, str]:
    """Writes the tiers into a file of the worker's, of which the environment tells."""
    return {f"{PREFIX}TIERS": str(write_tiers(context)), f"{PREFIX}WORKER": context.worker_id}

"""How a launched SGLang server gets the configured storage tiers: behind HiCache, by arguments."""

from __future__ import annotations

import json
from collections.abc import Container

from commutator import LaunchContext
from commutator.engine import missing_plugin, write_tiers
from commutator.errors import ConfigError
from commutator_sglang.config import SglangConfig

__all__ = ["check_tiers", "tier_arguments"]

_BACKEND = "--hicache-storage-backend"
_OPTIONS = "--hicache-storage-backend-extra-config"
_PAGE_TOKENS = "64"
"""SGLang's own page may be a single token: far too little for a block of its own."""


def check_tiers(config: SglangConfig, python: str, given: Container[str]) -> None:
    """Raises ConfigError when the tiers would be ignored, or cannot be loaded.

    ``given`` are the names of the arguments in `args`.
    """
    problem = None
    if config.role != "both":
        problem = "a server for prefill or decode only (`role`) has none"
    elif _BACKEND in given or _OPTIONS in given:
        problem = f"{_BACKEND} and its options are set from `tiers`; leave them out of `args`"
    elif "--disable-radix-cache" in given:
        problem = "nothing is reused with --disable-radix-cache"
    else:
        problem = missing_plugin(python, "commutator-sglang", "make sglang")
    if problem is not None:
        raise ConfigError([f"tiers: {problem}"], f"engine {config.name or config.kind}")


def tier_arguments(context: LaunchContext) -> dict[str, str]:
    """Writes the tiers into a file of the worker's."""
    options = {
        "backend_name": "commutator",
        "module_path": "commutator_sglang.hicache",
        "class_name": "CommutatorHiCache",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "tiers": str(write_tiers(context)),
        "worker": context.worker_id,
    }
    return {
        "--enable-hierarchical-cache": "",
        _BACKEND: "dynamic",
        _OPTIONS: json.dumps(options, separators=(",", ":")),
        "--page-size": _PAGE_TOKENS,
    }

"""How a launched SGLang server gets the configured storage tiers: behind HiCache, by arguments."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Container

import attrs

from commutator import LaunchContext
from commutator.errors import ConfigError
from commutator_sglang.config import SglangConfig

__all__ = ["check_tiers", "tier_arguments"]

_BACKEND = "--hicache-storage-backend"
_OPTIONS = "--hicache-storage-backend-extra-config"
_PAGE_TOKENS = "64"
"""SGLang's own page may be a single token: far too little for a block of its own."""
_LOOK = (
    "import sys; from importlib.util import find_spec; sys.exit(not find_spec('commutator_sglang'))"
)


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
    elif subprocess.run([python, "-c", _LOOK], check=False).returncode:  # noqa: S603
        problem = (
            f"{python} does not have our plugins: install commutator-sglang and the packages of "
            "the tiers in that environment, as `make sglang` does"
        )
    if problem is not None:
        raise ConfigError([f"tiers: {problem}"], f"engine {config.name or config.kind}")


def tier_arguments(context: LaunchContext) -> dict[str, str]:
    """Writes the tiers into a file of the worker's: the command line tells nothing about them."""
    file = context.state_dir / "tiers.json"
    file.write_text(json.dumps({"tiers": [attrs.asdict(tier) for tier in context.tiers]}))
    options = {
        "backend_name": "commutator",
        "module_path": "commutator_sglang.hicache",
        "class_name": "CommutatorHiCache",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "tiers": str(file),
        "worker": context.worker_id,
    }
    return {
        "--enable-hierarchical-cache": "",
        _BACKEND: "dynamic",
        _OPTIONS: json.dumps(options, separators=(",", ":")),
        "--page-size": _PAGE_TOKENS,
    }

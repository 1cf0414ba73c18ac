"""Storage tiers of servers that a connector launches and that run our manager in themselves."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import attrs

from commutator.engine.contract import LaunchContext

__all__ = ["missing_plugin", "write_tiers"]


def write_tiers(context: LaunchContext) -> Path:
    """The worker's tiers in a file of its own, for ``read_tiers``: a command line tells nothing."""
    file = context.state_dir / "tiers.json"
    file.write_text(json.dumps({"tiers": [attrs.asdict(tier) for tier in context.tiers]}))
    return file


def missing_plugin(python: str, distribution: str, made_by: str) -> str | None:
    """What is wrong with that environment if it lacks the plugin; ``made_by`` is a command."""
    package = distribution.replace("-", "_")
    look = f"import sys; from importlib.util import find_spec; sys.exit(not find_spec({package!r}))"
    if not subprocess.run([python, "-c", look], check=False).returncode:  # noqa: S603
        return None
    return (
        f"{python} does not have our plugins: install {distribution} and the packages of the "
        f"tiers in that environment, as `{made_by}` does"
    )

"""Reads the `tiers` of a configuration in the process of an engine that is not ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from commutator.config.model import TierConfig
from commutator.errors import ConfigError
from commutator.kv.tier_setup import TierSetup
from commutator.schema import StructureError, structure

__all__ = ["TierEntries", "read_tiers"]

TierEntries = str | Path | Sequence[Mapping[str, Any]] | Sequence[TierSetup]
"""A YAML or JSON file with `tiers:` in it, such as a whole configuration; the entries themselves;
or what was made from them."""


@frozen
class _Tiers:
    tiers: tuple[TierConfig, ...]


def read_tiers(entries: TierEntries, worker_id: str) -> tuple[TierSetup, ...]:
    """The tiers that are configured, fastest first. Nothing is opened yet.

    Raises ConfigError with every mistake, PluginError when a plugin breaks the contract, TierError
    when a codec's package or key is missing.
    """
    # These know every plugin, and plugins know this package.
    from commutator.config.kinds import config_converter  # noqa: PLC0415
    from commutator.engine.tiers import make_tiers  # noqa: PLC0415
    from commutator.plugins import load_plugins  # noqa: PLC0415

    if not isinstance(entries, str | Path):
        made = tuple(entry for entry in entries if isinstance(entry, TierSetup))
        if made:
            return made
    where = str(entries) if isinstance(entries, str | Path) else "tiers"
    host = load_plugins()
    found = _from_file(entries) if isinstance(entries, str | Path) else list(entries)
    if not isinstance(found, list) or not found:
        raise ConfigError(["tiers: expected a list of at least one tier"], where)
    try:
        configs = structure(config_converter(host), {"tiers": found}, _Tiers).tiers
    except StructureError as error:
        raise ConfigError([f"{path}: {text}" for path, text in error.problems], where) from error
    return make_tiers(configs, host, worker_id)


def _from_file(path: str | Path) -> Any:
    from commutator.config.tree import plain  # noqa: PLC0415 - brings PyYAML
    from commutator.config.yaml_file import read_file  # noqa: PLC0415

    return plain(read_file(path)).get("tiers")

"""What must agree between the tiers, and between them and the engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from commutator.plugins import PluginHost

__all__ = ["tier_problems"]


def tier_problems(data: Mapping[str, Any], host: PluginHost) -> Iterator[tuple[str, str]]:
    """(path, message) for each disagreement; kinds that are not known are told of elsewhere."""
    tiers, engines = data.get("tiers"), data.get("engines")
    if not isinstance(tiers, list) or not tiers or not isinstance(engines, list):
        return
    kinds = {engine.get("kind") for engine in engines if isinstance(engine, Mapping)}
    known = [host.engines.kinds[kind].thing for kind in kinds if kind in host.engines.kinds]
    if known and not any(connector.uses_tiers for connector in known):
        able = sorted(name for name, kind in host.engines.kinds.items() if kind.thing.uses_tiers)
        yield (
            "tiers",
            f"none of the engines here keeps KV blocks in tiers; those that do: {', '.join(able)}",
        )

"""What must agree between the tiers, and between them and the engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from commutator.config.tier_folders import folder_problems
from commutator.plugins import PluginHost
from commutator.transfer.spans import Memory

__all__ = ["tier_problems"]

_ENCODING = ("compression", "encryption_key")


def tier_problems(data: Mapping[str, Any], host: PluginHost) -> Iterator[tuple[str, str]]:
    """(path, message) for each disagreement; kinds that are not known are told of elsewhere."""
    tiers, engines = data.get("tiers"), data.get("engines")
    if not isinstance(tiers, list) or not tiers or not isinstance(engines, list):
        return
    yield from folder_problems(tiers, engines)
    kinds = {engine.get("kind") for engine in engines if isinstance(engine, Mapping)}
    known = [host.engines.kinds[kind].thing for kind in kinds if kind in host.engines.kinds]
    if known and not any(connector.uses_tiers for connector in known):
        able = sorted(name for name, kind in host.engines.kinds.items() if kind.thing.uses_tiers)
        names = ", ".join(able) or "none is installed"
        yield "tiers", f"none of the engines here keeps KV blocks in tiers; those that do: {names}"
    yield from _encodings(tiers, host)


def _encodings(tiers: Sequence[Any], host: PluginHost) -> Iterator[tuple[str, str]]:
    """Workers exchange the bytes as they lie in memory."""
    lent: Mapping[str, Any] | None = None
    for number, tier in enumerate(tiers):
        if not isinstance(tier, Mapping) or tier.get("kind") not in host.tiers.kinds:
            continue
        factory = host.tiers.kinds[tier["kind"]].thing
        if getattr(factory, "asks_peers", False):
            for option in _ENCODING if lent is not None else ():
                if lent is not None and tier.get(option) != lent.get(option):
                    message = (
                        f"must be the same as in the tier {lent['kind']}, which is lent as it is"
                    )
                    yield f"tiers[{number}].{option}", message
        elif lent is None and getattr(factory, "memory", None) is Memory.DRAM:
            lent = tier

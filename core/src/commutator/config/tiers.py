"""What must agree between the tiers, and between them and the engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from commutator.config.model import Config
from commutator.plugins import PluginHost
from commutator.transfer.spans import Memory

__all__ = ["sizing_warnings", "tier_problems"]

_ENCODING = ("compression", "encryption_key")


def tier_problems(data: Mapping[str, Any], host: PluginHost) -> Iterator[tuple[str, str]]:
    """(path, message) for each disagreement; kinds that are not known are told of elsewhere."""
    tiers, engines = data.get("tiers"), data.get("engines")
    if not isinstance(tiers, list) or not tiers or not isinstance(engines, list):
        return
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


def sizing_warnings(config: Config, host: PluginHost) -> Iterator[str]:
    """What is legal but makes little sense: a tier with less room than what lies above it.

    Sizes are those of one worker. A tier or an engine without a size in bytes is passed over.
    """
    above = [
        (f"the KV memory of engine {engine.name}", engine.kv_cache_bytes)
        for engine in config.engines
        if host.engines.kinds[engine.kind].thing.uses_tiers and hasattr(engine, "kv_cache_bytes")
    ]
    for number, tier in enumerate(config.tiers):
        size = getattr(tier, "capacity", None)
        if size is None:
            continue
        name = f"tiers[{number}] ({tier.kind})"
        other, larger = max(above, key=lambda named: named[1], default=("", 0))
        if size < larger:
            yield (
                f"{name}: its {size:,} bytes are {larger - size:,} less than the {larger:,} of "
                f"{other}, of which it can hold {size / larger:.0%}: it forgets blocks before "
                f"they are needed from it; set capacity to more than {larger:,}"
            )
        above = [*above, (name, size)]

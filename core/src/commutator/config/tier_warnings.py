"""What is legal between tiers but makes little sense."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from commutator.config.model import Config
from commutator.plugins import PluginHost
from commutator.transfer.spans import Memory

__all__ = ["tier_warnings"]

_SLOWNESS: Mapping[Memory | None, int] = {Memory.DRAM: 0, Memory.FILE: 1, Memory.OBJ: 2}


def tier_warnings(config: Config, host: PluginHost) -> Iterator[str]:
    """A line for each oddity, for ``commutator config check`` and ``serve``."""
    yield from _order_warnings(config, host)
    yield from _lending_warnings(config, host)
    yield from _sizing_warnings(config, host)


def _order_warnings(config: Config, host: PluginHost) -> Iterator[str]:
    """A faster tier below a slower one. Of peers nobody knows how fast they are."""
    slowest, name = -1, ""
    for number, tier in enumerate(config.tiers):
        factory = host.tiers.kinds[tier.kind].thing
        slowness = _SLOWNESS.get(getattr(factory, "memory", None))
        if slowness is None or getattr(factory, "asks_peers", False):
            continue
        mine = f"tiers[{number}] ({tier.kind})"
        if slowness < slowest:
            yield (
                f"{mine}: it is faster than {name}, which is listed before it: tiers are listed "
                "fastest first, and a block is read from the first one that has it; move it up"
            )
        elif slowness > slowest:
            slowest, name = slowness, mine


def _lending_warnings(config: Config, host: PluginHost) -> Iterator[str]:
    """A worker lends blocks in host memory, of a tier that is its own."""
    lender: str | None = None
    for number, tier in enumerate(config.tiers):
        factory = host.tiers.kinds[tier.kind].thing
        if getattr(factory, "asks_peers", False):
            if lender is None and getattr(tier, "listen", None) is not None:
                lender = f"tiers[{number}] ({tier.kind})"
        elif getattr(factory, "memory", None) is Memory.DRAM:
            return
    if lender is not None:
        yield (
            f"{lender}: it lends nothing to other workers, as no tier keeps blocks in host memory; "
            "add a tier of kind dram, or, if it is only to borrow, set listen: null"
        )


def _sizing_warnings(config: Config, host: PluginHost) -> Iterator[str]:
    """A tier with less room than what lies above it.

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

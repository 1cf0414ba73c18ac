"""Where a cached block lies, by speed: the tiers, and the words that engines use for them."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Tier", "tier_of"]


class Tier(IntEnum):
    """Fastest first; a block that lies in several tiers counts for the first of them."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    EXTERNAL = 3
    """An object store, a shared cache or another machine."""


_TIERS = {
    "GPU": Tier.DEVICE,
    "DEVICE": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.EXTERNAL,
    "NETWORK": Tier.EXTERNAL,
    "REMOTE": Tier.EXTERNAL,
    "SHARED": Tier.EXTERNAL,
}


def tier_of(medium: str | None) -> Tier | None:
    """The tier of an event's ``medium``; the device when it has none, None for an unknown word."""
    return Tier.DEVICE if medium is None else _TIERS.get(medium.upper())

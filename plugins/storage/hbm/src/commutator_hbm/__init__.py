"""A pool in a device's memory as a storage tier."""

from __future__ import annotations

from commutator import TierRegister, hookimpl
from commutator_hbm.tier import HbmConfig, HbmTier

__all__ = ["HbmConfig", "HbmTier"]


@hookimpl
def tier_register(register: TierRegister) -> None:
    register("hbm", HbmConfig, HbmTier, stability="beta")

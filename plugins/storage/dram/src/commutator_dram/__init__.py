"""Host memory as a storage tier."""

from __future__ import annotations

from commutator import TierRegister, hookimpl
from commutator_dram.tier import DramConfig, DramTier

__all__ = ["DramConfig", "DramTier"]


@hookimpl
def tier_register(register: TierRegister) -> None:
    register("dram", DramConfig, DramTier, stability="beta")

"""A local disk as a durable storage tier."""

from __future__ import annotations

from commutator import StorageTier, TierRegister, hookimpl
from commutator_nvme.config import NvmeConfig

__all__ = ["NvmeConfig"]


@hookimpl
def tier_register(register: TierRegister) -> None:
    register("nvme", NvmeConfig, _tier, stability="beta")


def _tier(config: NvmeConfig) -> StorageTier:
    from commutator_nvme.tier import NvmeTier

    return NvmeTier(config)

"""A local disk as a durable tier."""

from __future__ import annotations

from commutator import TierRegister, hookimpl
from commutator_nvme.config import NvmeConfig
from commutator_nvme.tier import NvmeTier

__all__ = ["NvmeConfig", "NvmeTier"]


@hookimpl
def tier_register(register: TierRegister) -> None:
    register("nvme", NvmeConfig, NvmeTier, stability="beta")

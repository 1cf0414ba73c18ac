"""A local disk as a durable storage tier."""

from __future__ import annotations

from typing import Any

from commutator import StorageTier, TierRegister, hookimpl
from commutator_nvme.config import NvmeConfig

__all__ = ["NvmeConfig", "NvmeTier"]


@hookimpl
def tier_register(register: TierRegister) -> None:
    register("nvme", NvmeConfig, _tier, stability="beta")


def _tier(config: NvmeConfig) -> StorageTier:
    from commutator_nvme.tier import NvmeTier

    return NvmeTier(config)


def __getattr__(name: str) -> Any:
    if name == "NvmeTier":
        from commutator_nvme.tier import NvmeTier

        return NvmeTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""A local disk as a durable tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commutator import TierRegister, hookimpl
from commutator_nvme.config import NvmeConfig

if TYPE_CHECKING:
    from commutator_nvme.tier import NvmeTier

__all__ = ["NvmeConfig", "NvmeTier"]


@hookimpl
def tier_register(register: TierRegister) -> None:
    register("nvme", NvmeConfig, _make, stability="beta")


def _make(config: NvmeConfig) -> NvmeTier:
    from commutator_nvme.tier import NvmeTier  # noqa: PLC0415 - it needs numpy

    return NvmeTier(config)


def __getattr__(name: str) -> Any:
    if name == "NvmeTier":
        from commutator_nvme.tier import NvmeTier  # noqa: PLC0415 - it needs numpy

        return NvmeTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

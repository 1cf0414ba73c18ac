"""A local disk as a durable tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commutator import TierRegister, hookimpl
from commutator.transfer import Memory
from commutator_nvme.config import NvmeConfig

if TYPE_CHECKING:
    from commutator_nvme.tier import NvmeTier

__all__ = ["NvmeConfig", "NvmeTier"]


@hookimpl
def tier_register(register: TierRegister) -> None:
    register("nvme", NvmeConfig, _Factory(), stability="beta")


class _Factory:
    """Makes the tier; until then there is only what the check of a configuration asks for."""

    memory = Memory.FILE

    def __call__(self, config: NvmeConfig) -> NvmeTier:
        from commutator_nvme.tier import NvmeTier  # noqa: PLC0415 - it needs numpy

        return NvmeTier(config)


def __getattr__(name: str) -> Any:
    if name == "NvmeTier":
        from commutator_nvme.tier import NvmeTier  # noqa: PLC0415 - it needs numpy

        return NvmeTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

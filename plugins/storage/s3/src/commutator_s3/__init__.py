"""An S3-compatible store as a storage tier that all workers with the same bucket share."""

from __future__ import annotations

from commutator import StorageTier, TierRegister, hookimpl
from commutator_s3.config import S3TierConfig

__all__ = ["S3TierConfig"]


@hookimpl
def tier_register(register: TierRegister) -> None:
    register("s3", S3TierConfig, _tier, stability="beta")


def _tier(config: S3TierConfig) -> StorageTier:
    from commutator_s3.tier import S3Tier

    return S3Tier(config)

"""KV blocks as objects in any S3-compatible store, shared by every worker that uses the bucket."""

from __future__ import annotations

from commutator import TierRegister, hookimpl
from commutator.kv import StorageTier
from commutator_s3.config import S3TierConfig

__all__ = ["S3TierConfig"]


@hookimpl
def tier_register(register: TierRegister) -> None:
    register("s3", S3TierConfig, _make, stability="beta")


def _make(config: S3TierConfig) -> StorageTier:
    from commutator_s3.tier import S3Tier  # noqa: PLC0415 - boto3 is slow to import

    return S3Tier(config)

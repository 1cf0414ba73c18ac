"""KV blocks as objects in any S3-compatible store, shared by every worker that uses the bucket."""

from __future__ import annotations

from commutator import TierRegister, hookimpl
from commutator.kv import StorageTier
from commutator.transfer import Memory
from commutator_s3.config import S3TierConfig

__all__ = ["S3TierConfig"]


@hookimpl
def tier_register(register: TierRegister) -> None:
    register("s3", S3TierConfig, _Factory(), stability="beta")


class _Factory:
    """Makes the tier; until then there is only what the check of a configuration asks for."""

    memory = Memory.OBJ

    def __call__(self, config: S3TierConfig) -> StorageTier:
        from commutator_s3.tier import S3Tier  # noqa: PLC0415 - boto3 is slow to import

        return S3Tier(config)

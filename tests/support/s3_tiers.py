"""S3 tiers over a fresh bucket of a real server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.seaweed import ACCESS_KEY, READER_KEY, SECRET_KEY, SeaweedServer

from commutator.contract.settings import Secret
from commutator_s3.config import S3TierConfig
from commutator_s3.tier import S3Tier

__all__ = ["MakeTier", "tier_maker"]

MakeTier = Callable[..., S3Tier]
"""With these options instead of its own."""


def tier_maker(
    seaweed: SeaweedServer, endpoint: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> MakeTier:
    """Makes tiers that reach the server at ``endpoint``, all over one bucket."""
    monkeypatch.setenv("TEST_S3_KEY", ACCESS_KEY)
    monkeypatch.setenv("TEST_S3_READER", READER_KEY)
    monkeypatch.setenv("TEST_S3_SECRET", SECRET_KEY)
    common: dict[str, Any] = {
        "kind": "s3",
        "bucket": seaweed.new_bucket(),
        "endpoint": endpoint,
        "access_key": Secret(env="TEST_S3_KEY"),
        "secret_key": Secret(env="TEST_S3_SECRET"),
    }
    return lambda **more: S3Tier(S3TierConfig(**(common | options | more)))

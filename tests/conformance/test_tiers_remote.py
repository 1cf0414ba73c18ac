"""The s3 tier passes the shipped suite, against a real S3 server."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import ClassVar

import pytest
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer

from commutator.contract.settings import Secret
from commutator.contract.tier import StorageTier
from commutator_engine_kit.kv.tiers.codecs import HEADER_BYTES
from commutator_s3.config import S3TierConfig
from commutator_s3.tier import S3Tier
from commutator_testing.tiers import TierContract

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class TestS3(TierContract):
    durable = True
    named = True
    max_examples = 8
    options: ClassVar[dict[str, object]] = {}

    @pytest.fixture(autouse=True)
    def _server(self, seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEST_S3_KEY", ACCESS_KEY)
        monkeypatch.setenv("TEST_S3_SECRET", SECRET_KEY)
        type(self).options = {
            "endpoint": seaweed.endpoint,
            "access_key": Secret(env="TEST_S3_KEY"),
            "secret_key": Secret(env="TEST_S3_SECRET"),
        }

    def make_tier(self, folder: Path) -> StorageTier:
        return S3Tier(
            S3TierConfig(
                kind="s3",
                bucket="conformance",
                create_bucket=True,
                prefix=hashlib.sha256(str(folder).encode()).hexdigest(),
                capacity=5 * (self.block_bytes + HEADER_BYTES),
                **self.options,  # type: ignore[arg-type]
            )
        )


class TestS3WithoutListing(TestS3):
    """What was stored before is found when it is asked for."""

    max_examples = 5

    def make_tier(self, folder: Path) -> StorageTier:
        type(self).options["list_limit"] = 0
        return super().make_tier(folder)

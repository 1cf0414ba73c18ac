"""What lies below the tiers of a server of another make: a folder on the disk, and an S3 server."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen
from tests.support.seaweed import SeaweedServer

from commutator.contract.settings import Secret
from commutator_s3.config import S3TierConfig

__all__ = ["S3_KEY", "S3_SECRET", "Stores"]

S3_KEY = "TEST_S3_KEY"
S3_SECRET = "TEST_S3_SECRET"
"""Environment variables that the server reads."""
_DATA_BYTES = 30 << 20
"""A file with blocks has more."""


@frozen
class Stores:
    """Both are empty at first."""

    seaweed: SeaweedServer
    folder: Path
    """Of the disk tier."""
    bucket: str

    @property
    def s3(self) -> S3TierConfig:
        return S3TierConfig(
            kind="s3",
            bucket=self.bucket,
            endpoint=self.seaweed.endpoint,
            access_key=Secret(env=S3_KEY),
            secret_key=Secret(env=S3_SECRET),
        )

    def damage_disk(self, every_bytes: int) -> None:
        """One byte in this many is wrong."""
        files = [file for file in self.folder.iterdir() if file.stat().st_size > _DATA_BYTES]
        assert files
        for file in files:
            with file.open("r+b") as opened:
                for start in range(0, file.stat().st_size, every_bytes):
                    place = start + (1 << 19)
                    opened.seek(place)
                    (byte,) = opened.read(1)
                    opened.seek(place)
                    opened.write(bytes([byte ^ 0xFF]))

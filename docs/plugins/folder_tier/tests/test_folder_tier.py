"""The shipped suite, and what happens to a file that somebody changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from commutator import StorageTier
from commutator_folder_tier import FolderConfig, FolderTier
from commutator_testing.tiers import TierContract


class TestFolderTier(TierContract):
    durable = True

    def make_tier(self, folder: Path) -> StorageTier:
        config = FolderConfig(kind="folder", path=str(folder / "blocks"), capacity=60_000)
        return FolderTier(config)

    def test_a_changed_file_is_noticed(self, tmp_path: Path) -> None:
        key = bytes(range(32))
        with self.use(tmp_path) as user:
            assert user.put(key, b"block" * 100)
            (file,) = tmp_path.rglob(key.hex())
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
            with pytest.raises(ValueError, match="damaged"):
                user.get(key)

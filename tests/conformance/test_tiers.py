"""Every storage tier of ours passes the shipped suite, on real memory and real files, by NIXL."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from commutator.contract.tier import StorageTier
from commutator_dram.tier import DramConfig, DramTier
from commutator_hbm.tier import HbmConfig, HbmTier
from commutator_nvme.config import NvmeConfig
from commutator_nvme.tier import NvmeTier
from commutator_testing.tiers import TierContract


class TestDram(TierContract):
    def make_tier(self, folder: Path) -> StorageTier:
        return DramTier(DramConfig(kind="dram", capacity=5 * self.block_bytes))


class TestDramInOrdinaryPages(TierContract):
    block_bytes = 5000  # not a multiple of a page

    def make_tier(self, folder: Path) -> StorageTier:
        return DramTier(DramConfig(kind="dram", capacity=5 * 8192, huge_pages="off"))


class TestHbm(TierContract):
    def make_tier(self, folder: Path) -> StorageTier:
        return HbmTier(HbmConfig(kind="hbm", capacity=5 * self.block_bytes))


class NvmeContract(TierContract):
    durable = True
    config = NvmeConfig(kind="nvme", path="-", capacity=5 * 8192 + 4000)

    def make_tier(self, folder: Path) -> StorageTier:
        return NvmeTier(evolve(self.config, path=str(folder / "blocks")))


class TestNvme(NvmeContract):
    pass


@pytest.mark.slow
class TestNvmeInManySegments(NvmeContract):
    """Two slots in each file."""

    block_bytes = 600_000
    config = NvmeConfig(kind="nvme", path="-", capacity=6 << 20, segment_size=1_300_000)


@pytest.mark.slow
class TestNvmeThroughThePageCache(NvmeContract):
    config = evolve(NvmeContract.config, direct="off", io="uring")


@pytest.mark.slow
class TestNvmeByAio(NvmeContract):
    config = evolve(NvmeContract.config, io="aio")


@pytest.mark.slow
class TestNvmeAgainstPowerCuts(NvmeContract):
    config = evolve(NvmeContract.config, durable="power")


class TestNvmeWithOddBlocks(NvmeContract):
    """Blocks that are no whole pages: not direct by itself, direct when asked to."""

    block_bytes = 5000


@pytest.mark.slow
class TestNvmeWithOddBlocksDirect(NvmeContract):
    block_bytes = 5000
    config = evolve(NvmeContract.config, direct="on")

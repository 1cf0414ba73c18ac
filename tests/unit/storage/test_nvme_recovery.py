"""How long the disk tier takes to find a million blocks again."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from commutator.contract.tier import SlotGeometry, StoredBlock
from commutator_nvme.config import NvmeConfig
from commutator_nvme.tier import NvmeTier

BLOCKS = 1_000_000
BLOCK_BYTES = 4096
GEOMETRY = SlotGeometry(
    block_bytes=BLOCK_BYTES, slot_bytes=BLOCK_BYTES, block_tokens=16, identity="a"
)
ROOM_BYTES = 6 << 30


@pytest.mark.long
def test_a_million_blocks_are_found_again_in_seconds(tmp_path: Path) -> None:
    assert shutil.disk_usage(tmp_path).free > ROOM_BYTES, "this test needs 6 GiB of disk"
    config = NvmeConfig(kind="nvme", path=str(tmp_path / "blocks"), capacity=BLOCKS * BLOCK_BYTES)
    try:
        tier = NvmeTier(config)
        tier.open(GEOMETRY)
        rng = random.Random(1)
        for _ in range(BLOCKS // 1000):
            keys = [rng.randbytes(32) for _ in range(1000)]
            tier.commit(
                StoredBlock(
                    key=key,
                    slot=slot,
                    size_bytes=BLOCK_BYTES,
                    checksum=rng.getrandbits(64),
                    parent=keys[0],
                    token_ids=tuple(rng.choices(range(150_000), k=16)),
                )
                for key, slot in zip(keys, tier.reserve(keys), strict=True)
                if slot is not None
            )
        before = {stored.key: stored for stored in tier.committed()}
        tier.close()
        with (tmp_path / "blocks" / "index").open("rb") as index:
            os.posix_fadvise(index.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        again = NvmeTier(config)
        start, start_cpu = time.perf_counter(), time.process_time()
        found = again.open(GEOMETRY)
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
        print(f"{len(found)} blocks in {wall_s:.1f} s, {cpu_s:.1f} s of one CPU")
        assert {stored.key: stored for stored in found} == before
        again.close()
        # It is half of the aim on an idle machine; other processes on the core and its cache cost
        # up to twice as much.
        assert cpu_s < 20
    finally:
        shutil.rmtree(tmp_path / "blocks", ignore_errors=True)

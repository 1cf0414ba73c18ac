"""A process is killed again and again while its KV service offloads blocks to disk."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from functools import partial
from pathlib import Path

import pytest
from tests.support.kv_rig import BLOCK_BYTES, KvRig, chain, setups, wait_for

pytestmark = pytest.mark.long

KILLS = 50
CHAIN = 6
SLOTS = 40_000
"""Nothing is evicted: whatever was acknowledged must be there to the end."""


def start(folder: Path) -> KvRig:
    return KvRig(
        setups(
            {"kind": "dram", "capacity": 24 * BLOCK_BYTES, "huge_pages": "off"},
            {"kind": "nvme", "path": str(folder), "capacity": SLOTS * BLOCK_BYTES},
        )
    )


def store_until_killed(folder: Path, log: Path, first: int) -> None:
    """Writes the number of each chain once all of it is stored."""
    said = os.open(log, os.O_WRONLY | os.O_APPEND)
    with start(folder) as rig:
        os.write(said, b"ready\n")
        for number in range(first, first + 100_000):
            rig.offload(chain(number, CHAIN))
            while rig.stored("device", "nvme") < CHAIN * (number - first + 1):
                rig.poll()
                time.sleep(0.0005)
            os.write(said, b"%d\n" % number)


def _is_ready(log: Path) -> bool:
    return log.read_bytes().startswith(b"ready\n")


def test_every_acknowledged_block_is_found_again_and_no_wrong_one(tmp_path: Path) -> None:
    rng = random.Random(1)
    folder = tmp_path / "blocks"
    # Every process but the first begins with all modules loaded.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.support.preloaded"])
    acknowledged: list[int] = []
    unfinished = 0
    for life in range(KILLS):
        first, log = life * 1_000_000, tmp_path / f"{life}.log"
        log.touch()
        process = context.Process(target=store_until_killed, args=(folder, log, first))
        process.start()
        wait_for(partial(_is_ready, log), 60)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.join()
        said = [int(word) for word in log.read_text().split()[1:]]
        acknowledged += said
        with start(folder) as rig:
            published = rig.tier("nvme").published
            following = max(said, default=first - 1) + 1
            begun = rig.load(chain(following, CHAIN))  # killed while it was stored
            assert CHAIN * len(acknowledged) <= published
            unfinished += begun > 0
            for number in said + rng.sample(acknowledged, min(5, len(acknowledged))):
                assert rig.load(chain(number, CHAIN)) == CHAIN, f"chain {number} of life {life}"
            rig.settle()
            assert "corrupt" not in rig.tier("nvme").loads
            assert not rig.tier("nvme").removed
    with start(folder) as rig:
        for number in acknowledged:
            assert rig.load(chain(number, CHAIN)) == CHAIN
    blocks = CHAIN * len(acknowledged)
    print(f"{KILLS} kills, {blocks} blocks acknowledged, {unfinished} chains half done")
    assert len(acknowledged) > KILLS, "it was killed before it could do anything"

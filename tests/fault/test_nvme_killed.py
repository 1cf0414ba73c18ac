"""The disk tier's process is killed again and again while it stores and evicts."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commutator.contract.tier import SlotGeometry
from commutator_nvme.config import NvmeConfig
from commutator_nvme.tier import NvmeTier
from commutator_testing.tier_user import TierUser

pytestmark = pytest.mark.slow

KILLS = 12
BLOCK_BYTES = 4096
SLOTS = 64
GEOMETRY = SlotGeometry(
    block_bytes=BLOCK_BYTES, slot_bytes=BLOCK_BYTES, block_tokens=4, identity="a"
)

# Says "+N" once block N is committed, and "-N" before it begins to evict it.
STORES = """
import random, sys
from tests.fault.test_nvme_killed import content, key, use
from pathlib import Path
first, rng, kept = int(sys.argv[2]), random.Random(sys.argv[2]), []
with use(Path(sys.argv[1])) as user:
    kept = sorted(int.from_bytes(stored.key[:8], "big") for stored in user.recovered)
    print("ready", flush=True)
    for number in range(first, first + 100_000):
        while len(kept) >= 40:
            gone = kept.pop(rng.randrange(len(kept)))
            print(f"-{gone}", flush=True)
            user.tier.evict([key(gone)])
        assert user.put(key(number), content(number))
        kept.append(number)
        print(f"+{number}", flush=True)
"""


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") * 4


def content(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def use(folder: Path) -> TierUser:
    config = NvmeConfig(kind="nvme", path=str(folder), capacity=SLOTS * BLOCK_BYTES)
    return TierUser(NvmeTier(config), GEOMETRY)


def test_committed_blocks_are_found_again_and_nothing_else(tmp_path: Path, root: Path) -> None:
    rng = random.Random(1)
    folder = tmp_path / "blocks"
    committed: set[int] = set()
    for life in range(KILLS):
        first = life * 1_000_000
        process = subprocess.Popen(
            [sys.executable, "-c", STORES, str(folder), str(first)],
            cwd=root, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, 0.15))
        process.kill()
        said = process.stdout.read().split()
        process.wait()
        process.stdout.close()
        uncertain = {int(said[-1][1:]) if said and said[-1][0] == "-" else -1}
        last = first - 1
        for word in said:
            number = int(word[1:])
            if word[0] == "+":
                committed.add(number)
                last = number
            else:
                committed.discard(number)
        with use(folder) as user:
            found = {int.from_bytes(stored.key[:8], "big") for stored in user.recovered}
            # Killed between the commit and the word, or between the word and the eviction.
            uncertain.add(last + 1)
            assert found - uncertain == committed - uncertain
            assert user.tier.statistics().damaged == 0
            for number in found:
                assert user.get(key(number)) == content(number)
            committed = found
    assert len(committed) > 10, "it was killed before it could do anything"

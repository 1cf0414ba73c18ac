"""A worker is killed; the next one knows whose the blocks on its disk are."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from tests.support.kv_rig import BLOCK_BYTES, KvRig, chain, setups

from commutator.contract.block import BlockStored

pytestmark = pytest.mark.slow

SLOTS = 16
OF_ALICE, OF_BOB = chain(1, 4), chain(2, 3)


def start(folder: Path) -> KvRig:
    """Alice may fill a quarter of the slots, others half."""
    return KvRig(
        setups(
            {
                "kind": "nvme",
                "path": str(folder),
                "capacity": SLOTS * BLOCK_BYTES,
                "tenant_share": 0.5,
                "tenant_shares": {"alice": 0.25},
            }
        )
    )


def store_and_die(folder: Path) -> None:
    rig = start(folder)
    rig.offload(OF_ALICE, tenant="alice")
    rig.offload(OF_BOB, tenant="bob", adapter="sql")
    rig.settle()
    os.kill(os.getpid(), signal.SIGKILL)


def test_shares_and_events_are_as_before(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=store_and_die, args=(tmp_path / "blocks",))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    with start(tmp_path / "blocks") as rig:
        rig.settle()
        told = {
            (event.cache_salt, event.adapter): len(event.block_hashes)
            for event in rig.events
            if isinstance(event, BlockStored)
        }
        assert told == {("alice", None): 4, ("bob", "sql"): 3}
        more = chain(3, 2)
        rig.offload(more, tenant="alice")
        rig.settle()
        assert rig.tier("nvme").published == 7, "Alice makes room with her own blocks"
        assert rig.tier("nvme").removed == {"evicted": 2}
        assert rig.load(more) == 2
        assert rig.load(OF_BOB) == 3

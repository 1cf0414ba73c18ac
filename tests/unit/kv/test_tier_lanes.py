"""Large moves: several threads move and check the bytes, each its part of the blocks."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from tests.support.faults import damage
from tests.support.kv_rig import KvRig, chain, setups

from commutator_engine_kit.nixl.moves import move_blocks

LARGE = 256 << 10
BLOCKS = 24


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("cpus", [1, 2])
def test_each_lane_moves_its_part(monkeypatch: pytest.MonkeyPatch, cpus: int, pieces: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    moved: list[tuple[str, int]] = []

    meeting = threading.Barrier(cpus, timeout=60)

    def noted(agent: Any, path: Any, blocks: Any, *options: Any) -> Any:
        name = threading.current_thread().name
        if name not in {other for other, _ in moved}:
            meeting.wait()  # no lane takes every part before the other one has begun
        moved.append((name, len(blocks)))
        return move_blocks(agent, path, blocks, *options)

    monkeypatch.setattr("commutator_engine_kit.kv.tiers.mover.move_blocks", noted)
    (setup,) = setups({"kind": "dram", "capacity": "20MB", "huge_pages": "off"})
    keys = chain(1, BLOCKS)
    with KvRig([setup], blocks=BLOCKS, block_bytes=LARGE, pieces=pieces) as rig:
        rig.store(keys)
        moved.clear()
        assert rig.load(keys) == BLOCKS
    assert len({name for name, _ in moved}) == cpus
    assert sum(blocks for _, blocks in moved) == BLOCKS * pieces


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("damaged", [3, BLOCKS - 3])
def test_a_changed_byte_is_found_in_every_lane(damaged: int, pieces: int) -> None:
    (setup,) = setups({"kind": "dram", "capacity": "20MB", "huge_pages": "off"})
    keys = chain(1, BLOCKS)
    with KvRig([setup], blocks=2 * BLOCKS, block_bytes=LARGE, pieces=pieces) as rig:
        rig.store(keys)
        assert rig.load(keys) == BLOCKS
        (stored,) = setup.tier.lookup(keys[damaged : damaged + 1])
        assert stored is not None
        damage(setup.tier, stored, LARGE - 1)
        assert rig.load(keys) == damaged
        loads = rig.tier("dram").loads
        assert loads == {"loaded": 2 * BLOCKS - 1, "corrupt": 1}

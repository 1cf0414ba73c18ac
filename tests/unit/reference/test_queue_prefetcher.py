"""Blocks are prefetched from slow tiers while requests wait, and after an answer."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.kv_rig import setups, wait_for
from tests.support.reference_options import sized
from tests.support.tiered_engine import TieredEngine
from tests.support.tiny_llama import TINY, tiny_model

from commutator.contract.worker import TierState
from commutator_reference.tiering import Tiering

MODEL = tiny_model()
BLOCK_SIZE = 4
SLOT_BYTES = -(-TINY.kv_bytes(BLOCK_SIZE, MODEL.dtype.itemsize) // 4096) * 4096
BLOCKS = 15
"""Full blocks of a prompt, without the last token."""


@pytest.fixture(autouse=True)
def no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the speed of computing is not known, everything that is found is loaded."""
    monkeypatch.setattr(Tiering, "computed", lambda *_: None)


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, 95) for _ in range(BLOCKS * BLOCK_SIZE + 1)]


def tiers(folder: Path, *, room: int = 200, **dram: Any) -> list[dict[str, Any]]:
    size = room * SLOT_BYTES
    return [
        {"kind": "dram", "capacity": size, "huge_pages": "off", "write": "on_evict", **dram},
        {"kind": "nvme", "path": str(folder), "capacity": "4MB"},
    ]


def engine(folder: Path, *, running: int = 1, blocks: int = 20, **dram: Any) -> TieredEngine:
    """Blocks go to disk once they are computed."""
    options = sized(
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        max_running_requests=running,
        max_tokens_per_step=128,
    )
    return TieredEngine(MODEL, setups(*tiers(folder, **dram)), options)


def tier(tiered: TieredEngine, name: str) -> TierState:
    return next(tier for tier in tiered.connector.statistics().tiers if tier.name == name)


def until_brought(tiered: TieredEngine, blocks: int, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while tier(tiered, "dram").prefetched.get("brought", 0) < blocks:
        assert time.monotonic() < deadline_s, tier(tiered, "dram").prefetched
        tiered.step()


def until_stored(tiered: TieredEngine, timeout_s: float = 60.0) -> None:
    """Step until no block is being stored in a tier or waits for it."""
    deadline_s = time.monotonic() + timeout_s
    while tiered.engine.storing:
        assert time.monotonic() < deadline_s, "blocks are not stored"
        tiered.step()
    tiered.until_settled()


def on_disk(tiered: TieredEngine, number: int) -> list[int]:
    """Answer a prompt; afterwards its blocks are on the disk only."""
    tiered.submit(number, prompt(number), 2)
    tiered.until_ended([number])
    until_stored(tiered)
    tiered.engine.reset_prefix_cache()
    tiered.step()
    tiered.until_settled()
    tiered.connector.stores.evict(tier="dram")
    tiered.until_settled()
    return tiered.tokens(number)


def test_a_request_that_waits_finds_its_blocks_in_memory(tmp_path: Path) -> None:
    with engine(tmp_path) as tiered:
        expected = on_disk(tiered, 1)
        before = tier(tiered, "dram").prefetched.get("brought", 0)
        tiered.submit(10, prompt(2), 10)  # computes, slowly
        tiered.step()
        tiered.submit(11, prompt(1), 2)
        while not tiered.ended(10):
            if tier(tiered, "dram").prefetched.get("brought", 0) < before + BLOCKS:
                time.sleep(0.05)
            tiered.step()
        until_brought(tiered, before + BLOCKS)
        tiered.until_ended([11])
        assert tiered.tokens(11) == expected
        tiered.until_settled()
        assert tiered.said[11][0].cached_tokens == BLOCKS * BLOCK_SIZE


def test_a_conversation_that_was_forgotten_comes_back_when_all_is_quiet(tmp_path: Path) -> None:
    with engine(tmp_path, running=2, blocks=160) as tiered:
        tiered.submit(1, prompt(1), 2)  # ends first
        tiered.submit(2, prompt(2), 60)
        tiered.until_ended([1])
        while tier(tiered, "nvme").published < 2 * BLOCKS:  # a few steps
            wait_for(lambda: tiered.connector.idle)
            tiered.step()
        wait_for(lambda: tiered.connector.idle)
        tiered.step()  # what was copied can be forgotten now
        tiered.engine.reset_prefix_cache()
        tiered.step()
        assert not tiered.ended(2)
        assert not tier(tiered, "dram").prefetched, "something runs"
        tiered.until_ended([2])
        until_brought(tiered, BLOCKS)
        tiered.submit(3, prompt(1), 2)
        tiered.until_ended([3])
        assert tiered.tokens(3) == tiered.tokens(1)
        assert tier(tiered, "dram").prefetched == {"brought": BLOCKS, "used": BLOCKS}
        assert tiered.loaded() == {"dram": BLOCKS, "nvme": 0}
        tiered.until_settled()


def test_a_tier_can_turn_it_off(tmp_path: Path) -> None:
    with engine(tmp_path, running=2, blocks=40, prefetch=False) as tiered:
        expected = on_disk(tiered, 1)
        for _ in range(200):
            tiered.step()
        assert tier(tiered, "dram").prefetched == {}
        tiered.submit(3, prompt(1), 2)
        tiered.until_ended([3])
        assert tiered.tokens(3) == expected
        assert tiered.loaded() == {"dram": 0, "nvme": BLOCKS}
        tiered.until_settled()

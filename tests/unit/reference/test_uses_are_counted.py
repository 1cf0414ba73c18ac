"""Uses are reported to tiers that count them, also where only evicted blocks are offered."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.support.kv_rig import setups
from tests.support.reference_options import sized
from tests.support.tiered_engine import TieredEngine
from tests.support.tiny_llama import TINY, tiny_model

MODEL = tiny_model()
BLOCK_SIZE = 4
SLOT_BYTES = -(-TINY.kv_bytes(BLOCK_SIZE, MODEL.dtype.itemsize) // 4096) * 4096
FULL_BLOCKS = 15


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, 95) for _ in range(FULL_BLOCKS * BLOCK_SIZE + 1)]


def engine(**tier: Any) -> TieredEngine:
    dram = {"kind": "dram", "capacity": 400 * SLOT_BYTES, "huge_pages": "off", **tier}
    return TieredEngine(MODEL, setups(dram), sized(num_blocks=72, block_size=BLOCK_SIZE))


def serve(tiered: TieredEngine, first_key: int, *numbers: int) -> None:
    for key, number in enumerate(numbers, first_key):
        tiered.submit(key, prompt(number), 2)
        tiered.until_ended([key])
        while tiered.engine.storing:
            tiered.step()
        tiered.until_settled()


def kept(tiered: TieredEngine) -> int:
    return tiered.connector.statistics().tiers[0].published


@pytest.mark.parametrize("write", ["on_evict", "through"])
def test_what_was_used_twice_is_kept(write: str) -> None:
    with engine(write=write, admission={"min_hits": 2}) as tiered:
        serve(tiered, 0, *range(8))
        assert kept(tiered) == 0, "used once"
        serve(tiered, 100, *range(20, 22), 21, *range(30, 38))
        assert kept(tiered) == FULL_BLOCKS, "used again while the device had it"
        serve(tiered, 200, *range(8), *range(40, 48))
        assert kept(tiered) >= 8 * FULL_BLOCKS, "computed again"


def test_a_load_is_one_use() -> None:
    with engine(write="on_evict", admission={"min_hits": 2}) as tiered:
        serve(tiered, 0, 1, 1, *range(10, 18))
        manager = tiered.connector._stack.manager
        assert manager._uses is not None
        uses = dict(manager._uses._values)
        serve(tiered, 100, 1)
        assert tiered.loaded()["dram"] == FULL_BLOCKS
        loaded = {one: count for one, count in manager._uses._values.items() if uses.get(one) == 2}
        assert set(loaded.values()) == {3}

"""A long store is cut into parts, so that a load need not wait for all of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from commutator.contract.block import BlockDescriptor
from commutator.contract.tier import Memory, Span
from commutator_engine_kit.kv.stores import part_blocks, store_job
from commutator_engine_kit.kv.tiers.executor import StoreOutcome, TierExecutor

KIB = 1 << 10


class Recorder:
    """Stores nothing, and remembers how many blocks came together."""

    is_open = True

    def __init__(self, memory: Memory) -> None:
        self.setup = SimpleNamespace(
            tier=SimpleNamespace(memory=memory), config=SimpleNamespace(store_timeout_s=1.0)
        )
        self.parts: list[int] = []

    def store(self, offers: list[BlockDescriptor], *_: object, **__: object) -> StoreOutcome:
        self.parts.append(len(offers))
        return StoreOutcome([], {offer.key: "recorded" for offer in offers})


@pytest.mark.parametrize(
    ("block_bytes", "in_objects", "elsewhere"),
    [
        (KIB, 256, 256),
        (64 * KIB, 256, 256),
        (1024 * KIB, 32, 64),
        (2048 * KIB, 16, 32),
        (64 << 20, 16, 16),
    ],
)
def test_larger_blocks_and_slower_tiers_make_shorter_parts(
    block_bytes: int, in_objects: int, elsewhere: int
) -> None:
    assert part_blocks(block_bytes, Memory.OBJ) == in_objects
    assert part_blocks(block_bytes, Memory.FILE) == elsewhere
    assert part_blocks(block_bytes, Memory.DRAM) == elsewhere


def test_every_block_is_in_exactly_one_part_and_others_may_go_between() -> None:
    worker, told = Recorder(Memory.OBJ), list[Any]()
    offers = [BlockDescriptor(key=bytes([i]) * 32, parent=None, token_ids=(0,)) for i in range(70)]
    parts = store_job(
        offers,
        [Span(0, 1024 * KIB)] * len(offers),
        from_engine=True,
        done=lambda stored, failed: told.append((stored, failed)),
    )(cast("TierExecutor", worker))
    assert parts is not None
    assert len(list(parts)) == 2
    assert worker.parts == [32, 32, 6]
    assert told == [([], {offer.key: "recorded" for offer in offers})]

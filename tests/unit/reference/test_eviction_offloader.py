"""Blocks are copied to a tier before the device evicts them, and no step waits for the copy."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence as Many
from typing import Any, cast

import pytest
from attrs import define, field
from tests.support.kv_rig import setups, wait_for
from tests.support.reference_integrity import chain_of

from commutator.contract.block import BlockDescriptor, CacheIdentity
from commutator.contract.tier import Memory
from commutator_engine_kit.kv.arena import BlockArena
from commutator_engine_kit.kv.connector import KvConnector
from commutator_engine_kit.kv.groups import KvGroup, whole
from commutator_engine_kit.kv.tier_stack import Polled
from commutator_reference.block_pool import BlockPool
from commutator_reference.tiering import EvictionOffloader, Tiering

POOL = 400
BLOCK_BYTES = 4096
PROMPT = 128
IDENTITY = CacheIdentity(
    model="m", weights="w", tokenizer="t", dtype="float32", layout="test", block_size=4
)


@define
class SlowTier:
    """A connector whose copies take ``steps`` steps; while ``down``, it stores nothing."""

    steps: int = 1
    down: bool = False
    kept: set[bytes] = field(factory=set)
    asked: int = 0
    takes_evicted: bool = True
    takes_computed: bool = False
    counts_uses: bool = False
    groups: Many[KvGroup] = whole(4, BLOCK_BYTES)
    _under_way: list[tuple[int, bytes, int]] = field(factory=list)
    _now: int = 0

    @property
    def stores(self) -> SlowTier:
        return self

    def offload_evicted(self, offers: Many[BlockDescriptor], blocks: Many[int]) -> None:
        self.asked += len(offers)
        ready = self._now if self.down else self._now + self.steps
        self._under_way += [
            (ready, offer.key, block) for offer, block in zip(offers, blocks, strict=True)
        ]

    def admissible(self, offers: Many[BlockDescriptor]) -> set[bytes]:
        return set() if self.down else {offer.key for offer in offers} - self.kept

    def poll(self) -> Polled:
        self._now += 1
        over = [one for one in self._under_way if one[0] <= self._now]
        self._under_way = [one for one in self._under_way if one[0] > self._now]
        if not self.down:
            self.kept.update(key for _, key, _ in over)
        return Polled(released=[block for _, _, block in over])


class Device:
    """Computes prompts without common prefixes, a given number of blocks in each step."""

    def __init__(self, connector: Any, blocks: int = POOL) -> None:
        self.pool = BlockPool(blocks, 4)
        self.tiering = Tiering(cast(KvConnector, connector), self.pool)
        self.computed: list[BlockDescriptor] = []

    def compute(self, number: int, length: int, per_step: int, *, idle_steps: int = 0) -> None:
        chain = chain_of([number, index, 0, 0] for index in range(length))
        held: list[int] = []
        while len(held) < length:
            self.step()
            blocks = self.pool.allocate(min(per_step, length - len(held)))
            assert blocks is not None, "a step waits for copies"
            for block in blocks:
                held.append(self.pool.register(block, chain[len(held)]))
        self.pool.release(held)
        self.computed += chain
        for _ in range(idle_steps):
            self.step()

    def step(self) -> None:
        self.tiering.update()

    def forgotten(self) -> list[bytes]:
        return [one.key for one in self.computed if self.pool.find(one) is None]


class RealDevice(Device):
    """With a dram tier, which has copied before the next step, as steps take longer."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BLOCK_BYTES * POOL)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        tier = {"kind": "dram", "capacity": "16MB", "write": "on_evict", "huge_pages": "off"}
        self.connector = KvConnector(
            setups(tier),
            BlockArena(memory=Memory.DRAM, address=address, block_bytes=BLOCK_BYTES, count=POOL),
            IDENTITY,
            worker_id="device",
            reports_evictions=True,
        )
        self.connector.start()
        super().__init__(self.connector)

    def step(self) -> None:
        super().step()
        wait_for(lambda: self.connector.idle)


@pytest.mark.parametrize("per_step", [8, 32, 128])
def test_what_is_forgotten_is_found_in_the_tier_however_large_the_steps(per_step: int) -> None:
    device = RealDevice()
    try:
        for number in range(12):
            device.compute(number, PROMPT, per_step, idle_steps=5)
        gone = device.forgotten()
        lost = [reason for reason in device.connector.lookups.explain(gone) if not reason.held]
        assert len(gone) > 1000
        assert len(lost) <= len(gone) // 20, f"{len(lost)} of {len(gone)}"
    finally:
        device.connector.close()


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("per_step", [1, 4, 16])
def test_a_tier_may_take_several_steps_to_copy(per_step: int, steps: int) -> None:
    tier = SlowTier(steps)
    device = Device(tier)
    for number in range(30):
        device.compute(number, 64, per_step)
    gone = device.forgotten()
    lost = [key for key in gone if key not in tier.kept]
    assert len(gone) > 1400
    assert len(lost) <= len(gone) // 20, f"{len(lost)} of {len(gone)}"


def test_blocks_that_will_not_be_needed_soon_are_left_alone() -> None:
    tier = SlowTier()
    device = Device(tier)
    for number in range(4):
        device.compute(number, 64, 4, idle_steps=20)
    assert not tier.asked, "there is room for more than two steps"
    for number in range(4, 12):
        device.compute(number, 64, 4, idle_steps=20)
    assert tier.asked <= len(device.forgotten()) + 3 * 4


def test_what_was_computed_again_is_offered_again() -> None:
    tier = SlowTier(down=True)
    device = Device(tier, blocks=8)
    for number in (1, 2, 3):
        device.compute(number, 6, 6, idle_steps=4)
    for round_ in range(3):
        for number in (1, 2, 3):
            before = tier.asked
            device.compute(number, 6, 6, idle_steps=4)
            assert tier.asked > before, f"round {round_}, prompt {number}"


def test_what_was_refused_or_lost_is_offered_once_the_tier_takes_it() -> None:
    tier, now_s = SlowTier(down=True), [0.0]
    pool = BlockPool(8, 4)
    offloader = EvictionOffloader(cast(KvConnector, tier), pool, lambda: now_s[0])
    blocks = pool.allocate(8)
    assert blocks is not None
    contents = [block for number in range(8) for block in chain_of([[number] * 4])]
    keys = [block.key for block in contents]
    pool.release([pool.register(*pair) for pair in zip(blocks, contents, strict=True)])

    def offered() -> set[bytes]:
        return {pool.descriptor(block).key for block in offloader.take(8)}

    assert offered() == set(keys[-4:]), "the last of a chain go first; half may be on their way"
    assert offered() == set(keys[:4])
    assert not offered()
    now_s[0] = 10.0
    assert not offered(), "the tier is still down, and is not asked in vain"
    tier.down, tier.kept = False, {keys[3]}
    assert not offered()
    now_s[0] = 20.0
    assert offered() == set(keys[-4:])
    tier.kept.update(keys[-4:])
    assert offered() == set(keys[:3]), "but for the one that is there"


def test_a_step_as_large_as_the_last_one_finds_its_blocks_while_others_are_copied() -> None:
    device = Device(SlowTier(steps=1000), blocks=64)  # copies that never end
    for number in range(8):
        device.compute(number, 16, 16)
    assert device.tiering.storing
    assert device.pool.available >= 16

"""The suite for tiers is worth something only if it fails: tiers with one mistake each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from commutator.contract.block import BlockKey
from commutator.contract.tier import Region, Slot, SlotGeometry, Span, StorageTier, StoredBlock
from commutator_dram.tier import DramConfig, DramTier
from commutator_engine_kit.kv.tiers.slot_tier import OpenedSlots
from commutator_nvme.config import NvmeConfig
from commutator_nvme.tier import NvmeTier
from commutator_testing.tiers import TierContract


class IgnoresPins(DramTier):
    def pin(self, slot: Slot) -> None:
        pass

    def unpin(self, slot: Slot) -> None:
        pass


class OverlappingSlots(DramTier):
    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        return super().place(slot // 2, size_bytes)


class SameSlotAgain(DramTier):
    def reserve(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        return [0 if slot is not None else None for slot in super().reserve(keys)]


class NeverEvicts(DramTier):
    def evict(self, keys: Iterable[BlockKey]) -> None:
        pass


class LeaksReleasedSlots(DramTier):
    def release(self, slots: Iterable[Slot]) -> None:
        pass


class CommitsNothing(NvmeTier):
    def remember(self, blocks: Sequence[StoredBlock]) -> None:
        pass


class ForgetsToForget(NvmeTier):
    def forget(self, blocks: Sequence[StoredBlock]) -> None:
        pass


class FailsAtTheSecondBlock(DramTier):
    failures = 0

    def commit(self, blocks: Iterable[StoredBlock]) -> None:
        super().commit(blocks)
        if len(list(self.committed())) > 1:
            type(self).failures += 1
            raise ValueError("the second block")


class RecoversTooLittle(NvmeTier):
    def open_slots(self, geometry: SlotGeometry) -> OpenedSlots:
        opened = super().open_slots(geometry)
        return OpenedSlots(opened.capacity, opened.committed[1:])


def contract_for(tier: type[StorageTier], *, is_durable: bool) -> TierContract:
    class Contract(TierContract):
        durable = is_durable
        max_examples = 200  # it stops at the first failure

        def make_tier(self, folder: Path) -> StorageTier:
            if issubclass(tier, NvmeTier):
                return tier(NvmeConfig(kind="nvme", path=str(folder / "x"), capacity=5 * 8192))
            assert issubclass(tier, DramTier)
            return tier(DramConfig(kind="dram", capacity=5 * 8192))

    return Contract()


@pytest.mark.parametrize(
    ("tier", "durable"),
    [
        (IgnoresPins, False),
        (OverlappingSlots, False),
        (SameSlotAgain, False),
        (NeverEvicts, False),
        (LeaksReleasedSlots, False),
        (CommitsNothing, True),
        (ForgetsToForget, True),
        (RecoversTooLittle, True),
        (DramTier, True),
        (NvmeTier, False),
    ],
)
def test_the_suite_finds(tier: type[StorageTier], *, durable: bool) -> None:
    contract = contract_for(tier, is_durable=durable)
    with pytest.raises((AssertionError, ValueError, ExceptionGroup)):
        contract.test_lives_by_the_rules()


def test_a_failure_is_reported_without_a_long_search_for_a_shorter_history() -> None:
    contract = contract_for(FailsAtTheSecondBlock, is_durable=False)
    with pytest.raises((ValueError, ExceptionGroup)):
        contract.test_lives_by_the_rules()
    assert FailsAtTheSecondBlock.failures <= 3, "found, and repeated for the report"


@pytest.mark.parametrize(("tier", "durable"), [(DramTier, False), (NvmeTier, True)])
def test_the_suite_has_nothing_against(tier: type[StorageTier], *, durable: bool) -> None:
    contract = contract_for(tier, is_durable=durable)
    contract.max_examples = 10
    contract.test_lives_by_the_rules()

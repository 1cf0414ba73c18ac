"""The suite for tiers is worth something only if it fails: tiers with one mistake each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from commutator.kv import BlockKey, OpenedSlots, Slot, SlotGeometry, StorageTier, Stored
from commutator.testing import TierContract
from commutator.transfer import Region, Span
from commutator_dram import DramConfig, DramTier
from commutator_nvme import NvmeConfig, NvmeTier


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
    def remember(self, blocks: Sequence[Stored]) -> None:
        pass


class ForgetsToForget(NvmeTier):
    def forget(self, blocks: Sequence[Stored]) -> None:
        pass


class RecoversTooLittle(NvmeTier):
    def open_slots(self, geometry: SlotGeometry) -> OpenedSlots:
        opened = super().open_slots(geometry)
        return OpenedSlots(opened.capacity, opened.committed[1:])


@pytest.fixture(autouse=True)
def without_shrinking() -> Iterator[None]:
    """That it fails is enough; to look for the shortest story takes minutes."""
    before = settings.get_current_profile_name()
    settings.register_profile("first-failure", phases=[Phase.generate])
    settings.load_profile("first-failure")
    yield
    settings.load_profile(before)


def contract_for(tier: type[StorageTier], *, is_durable: bool) -> TierContract:
    class Contract(TierContract):
        durable = is_durable
        max_examples = 200  # stops at the first failure

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


@pytest.mark.parametrize(("tier", "durable"), [(DramTier, False), (NvmeTier, True)])
def test_the_suite_has_nothing_against(tier: type[StorageTier], *, durable: bool) -> None:
    contract = contract_for(tier, is_durable=durable)
    contract.max_examples = 10
    contract.test_lives_by_the_rules()

"""Host memory and the engine's memory as tiers: where their slots lie, and what they refuse."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

import commutator_dram.memory
from commutator.errors import TierError
from commutator.kv import BlockArena, SlotGeometry
from commutator.testing import TierUser
from commutator.transfer import Memory
from commutator_dram import DramConfig, DramTier
from commutator_dram.memory import HugePages
from commutator_hbm import HbmConfig, HbmTier

GEOMETRY = SlotGeometry(block_bytes=5000, slot_bytes=5000, identity="a")
NO_MEMORY = 1 << 60


def test_slots_of_host_memory_are_page_aligned() -> None:
    tier = DramTier(DramConfig(kind="dram", capacity=3 * 8192 + 1))
    tier.open(GEOMETRY)
    spans = [tier.place(slot, 5000)[0] for slot in range(3)]
    assert [span.address % 4096 for span in spans] == [0, 0, 0]
    assert [span.address - spans[0].address for span in spans] == [0, 8192, 16384]
    with pytest.raises(IndexError):
        tier.place(3, 1)
    tier.close()


@pytest.mark.parametrize("capacity", [8191, NO_MEMORY])
def test_host_memory_of_an_impossible_size(capacity: int) -> None:
    with pytest.raises(TierError, match=r"at least 8192|lower its capacity"):
        DramTier(DramConfig(kind="dram", capacity=capacity)).open(GEOMETRY)


def test_huge_pages_that_are_required_but_not_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, facts = tmp_path / "enabled", tmp_path / "meminfo"
    never.write_text("always madvise [never]\n")
    facts.write_text("MemTotal: 1 kB\n")
    monkeypatch.setattr(commutator_dram.memory, "_TRANSPARENT", never)
    monkeypatch.setattr(commutator_dram.memory, "_MEMORY_FACTS", facts)
    config = DramConfig(kind="dram", capacity=1 << 20, huge_pages="required")
    with pytest.raises(TierError, match=r"vm\.nr_hugepages"):
        DramTier(config).open(GEOMETRY)
    others: list[HugePages] = ["auto", "off"]
    for huge_pages in others:
        commutator_dram.memory.allocate(1 << 20, huge_pages).close()


def test_transparent_huge_pages_are_asked_for(tmp_path: Path) -> None:
    """The kernel lists the mapping as one that may have huge pages, unless they are off."""
    if "[never]" in commutator_dram.memory._TRANSPARENT.read_text():
        pytest.skip("this kernel gives no transparent huge pages")
    both: list[tuple[HugePages, bool]] = [("auto", True), ("off", False)]
    for huge_pages, expected in both:
        memory = commutator_dram.memory.allocate(8 << 20, huge_pages)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert may_have_huge_pages(address) == expected
        memory.close()


def may_have_huge_pages(address: int) -> bool:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return {"hg", "ht"} & set(line.split()[1:]) != set()
    raise AssertionError("no such mapping")


def test_the_slots_of_an_engine_are_its_blocks() -> None:
    memory = mmap.mmap(-1, 4 * 5000)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    tier = HbmTier(HbmConfig(kind="hbm"))
    tier.use(BlockArena(memory=Memory.DRAM, address=address, block_bytes=5000, count=4))
    with TierUser(tier, GEOMETRY) as user:
        assert tier.statistics().capacity == 4
        (slot,) = tier.reserve([b"k" * 32])
        assert slot is not None
        tier.commit([user.write(slot, b"k" * 32, b"engine" * 500)])
        assert memory[slot * 5000 :][:3000] == b"engine" * 500
        memory[slot * 5000 : slot * 5000 + 1] = b"X"
        with pytest.raises(ValueError, match="other bytes"):
            user.get(b"k" * 32)


def test_engine_memory_that_does_not_fit() -> None:
    tier = HbmTier(HbmConfig(kind="hbm"))
    with pytest.raises(TierError, match="set capacity to at least 5000"):
        tier.open(GEOMETRY)
    tier.use(BlockArena(memory=Memory.DRAM, address=0, block_bytes=4999, count=4))
    with pytest.raises(TierError, match="cannot hold 5000"):
        tier.open(GEOMETRY)


def test_devices() -> None:
    with pytest.raises(ValueError, match="cuda:NUMBER"):
        HbmConfig(kind="hbm", device="gpu")
    with pytest.raises(TierError, match=r"cuda:999 cannot be had"):
        HbmTier(HbmConfig(kind="hbm", capacity=50_000, device="cuda:999")).open(GEOMETRY)
    with pytest.raises(TierError, match="lower capacity"):
        HbmTier(HbmConfig(kind="hbm", capacity=NO_MEMORY)).open(GEOMETRY)

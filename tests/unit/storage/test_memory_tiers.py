"""Host memory and the engine's memory as tiers: where their slots lie, and what they refuse."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from click.testing import CliRunner

import commutator_dram.tier
from commutator.cli.main import main
from commutator.contract.block import CacheLevel, cache_level
from commutator.contract.tier import SlotGeometry
from commutator.errors import TierError
from commutator_dram.tier import DramConfig, DramTier, HugePages
from commutator_hbm.tier import HbmConfig, HbmTier
from commutator_testing.tier_user import TierUser

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
    monkeypatch.setattr(commutator_dram.tier, "_TRANSPARENT", never)
    monkeypatch.setattr(commutator_dram.tier, "_MEMINFO", facts)
    config = DramConfig(kind="dram", capacity=1 << 20, huge_pages="required")
    with pytest.raises(TierError, match=r"vm\.nr_hugepages"):
        DramTier(config).open(GEOMETRY)
    others: list[HugePages] = ["auto", "off"]
    for huge_pages in others:
        commutator_dram.tier.allocate(1 << 20, huge_pages).close()


def test_transparent_huge_pages_are_asked_for(tmp_path: Path) -> None:
    """The kernel lists the mapping as one that may have huge pages, unless they are off."""
    if "[never]" in commutator_dram.tier._TRANSPARENT.read_text():
        pytest.skip("this kernel gives no transparent huge pages")
    both: list[tuple[HugePages, bool]] = [("auto", True), ("off", False)]
    for huge_pages, expected in both:
        memory = commutator_dram.tier.allocate(8 << 20, huge_pages)
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


def test_a_pool_in_the_memory_of_a_device() -> None:
    tier = HbmTier(HbmConfig(kind="hbm", capacity=4 * 5000 + 4999))
    with TierUser(tier, GEOMETRY) as user:
        assert tier.statistics().capacity == 4
        (slot,) = tier.reserve([b"k" * 32])
        assert slot is not None
        tier.commit([user.write(slot, b"k" * 32, b"engine" * 500)])
        stored = ctypes.string_at(tier.arena.span(slot).address, 5000)
        assert stored[:3000] == b"engine" * 500
        ctypes.memset(tier.arena.span(slot).address, ord("X"), 1)
        with pytest.raises(ValueError, match="bytes differ"):
            user.get(b"k" * 32)


def test_a_pool_is_not_the_memory_of_the_engine() -> None:
    """In KV events it is another place, so that routers do not mix the two up."""
    assert cache_level(HbmTier.medium) is CacheLevel.HOST


def test_a_pool_too_small_for_a_block() -> None:
    with pytest.raises(TierError, match="set it to at least 5000"):
        HbmTier(HbmConfig(kind="hbm", capacity=4999)).open(GEOMETRY)


def test_the_memory_of_the_engine_is_no_tier(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "models: [{name: m, source: package:m}]\n"
        "engines: [{kind: reference}]\n"
        "tiers: [{kind: hbm}]\n"
    )
    done = CliRunner().invoke(main, ["config", "check", "--elsewhere", str(file)])
    assert done.exit_code == 1, done.output
    (problem,) = [line for line in done.output.splitlines() if "tiers[0]" in line]
    assert ":3: tiers[0].capacity: required" in problem
    assert "needs no entry here" in problem
    file.write_text(file.read_text().replace("{kind: hbm}", "{kind: hbm, capacity: 10GB}"))
    assert CliRunner().invoke(main, ["config", "check", "--elsewhere", str(file)]).exit_code == 0


def test_devices() -> None:
    with pytest.raises(ValueError, match="cuda:NUMBER"):
        HbmConfig(kind="hbm", capacity=50_000, device="gpu")
    with pytest.raises(TierError, match=r"cannot allocate \d+ bytes on cuda:999"):
        HbmTier(HbmConfig(kind="hbm", capacity=50_000, device="cuda:999")).open(GEOMETRY)
    with pytest.raises(TierError, match="lower capacity"):
        HbmTier(HbmConfig(kind="hbm", capacity=NO_MEMORY)).open(GEOMETRY)

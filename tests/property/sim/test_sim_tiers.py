"""The sim engine's tiers: which blocks their policies retain, and how long loads take."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sim_config import sim_config, sim_tier

from commutator.config.kinds import config_converter
from commutator.contract.eviction import EvictionConfig
from commutator.contract.request import KvRetention
from commutator.contract.tier import AdmissionConfig
from commutator.errors import ConfigError
from commutator.plugins import installed_plugins
from commutator.schema import structure
from commutator_sim.config import SimTier
from commutator_sim.events import Offloaded, Removed
from commutator_sim.request import SimRequest
from commutator_sim.tiers import Load, OffloadTiers

HOST = sim_tier("host", 10, 100, block_size=1000, write="on_evict")
DISK = evolve(HOST, kind="disk", capacity_blocks=100)
FAST = sim_tier("host", 10, 100, block_size=1000)


def tiers_of(*tiers: SimTier) -> OffloadTiers:
    """Computing a block takes 1000 ns."""
    return OffloadTiers(sim_config(prefill_tokens_per_s=1e9, block_size=1000, tiers=tiers))


def use(tiers: OffloadTiers, keys: Iterable[int], **asked: object) -> dict[str, set[int]]:
    """Compute each block in a prompt of its own and evict it; returns what the tiers hold."""
    held: dict[str, set[int]] = {}
    for key in keys:
        request = SimRequest(1000, 1, [key], **asked)  # type: ignore[arg-type]
        events = [*tiers.on_device(request, 0, 1, 0), *tiers.evict([key], 0)]
        for event in events:
            here = held.setdefault(event.tier, set())
            if isinstance(event, Offloaded):
                here.update(event.blocks)
            else:
                here.difference_update(event.blocks)
    return held


def found(tiers: OffloadTiers, keys: Iterable[int]) -> list[int]:
    return [key for key in keys if tiers.load([key], 0).blocks]


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), max_size=40))
def test_lru_keeps_what_was_evicted_last(batches: list[list[int]]) -> None:
    tiers, kept = tiers_of(HOST), OrderedDict[int, None]()
    told: set[int] = set()
    for batch in batches:
        for key in batch:
            assert not tiers.on_device(SimRequest(1000, 1, [key]), 0, 1, 0)
        events = tiers.evict(batch, 0)
        assert events[-1] == Removed(0, "device", tuple(batch))
        for event in events[:-1]:
            told = (
                told | {*event.blocks} if isinstance(event, Offloaded) else told - {*event.blocks}
            )
            assert len(told) <= HOST.capacity_blocks
        for key in sorted(batch, key=lambda key: key not in kept):
            kept[key] = None
            kept.move_to_end(key)
        while len(kept) > HOST.capacity_blocks:
            kept.popitem(last=False)
        assert told == set(kept)


@pytest.mark.parametrize(
    ("policy", "kept"), [("lru", []), ("s3fifo", [1, 2, 3]), ("arc", [1, 2, 3])]
)
def test_the_policy_decides_what_a_scan_drives_out(policy: str, kept: list[int]) -> None:
    converter = config_converter(installed_plugins())
    eviction = structure(converter, {"kind": policy}, EvictionConfig)
    tiers = tiers_of(evolve(HOST, eviction=eviction))
    use(tiers, [1, 2, 3])
    for _ in range(3):
        assert found(tiers, [1, 2, 3]) == [1, 2, 3]
    use(tiers, range(100, 112))
    assert found(tiers, [1, 2, 3]) == kept


def test_what_the_first_tier_gives_up_goes_to_the_next_or_is_there_already() -> None:
    assert use(tiers_of(HOST, DISK), range(15)) == {
        "device": set(),
        "host": set(range(5, 15)),
        "disk": set(range(5)),
    }
    through = use(tiers_of(HOST, evolve(DISK, write="through")), range(15))
    assert (through["host"], through["disk"]) == (set(range(5, 15)), set(range(15)))


def test_admission() -> None:
    request = SimRequest(2000, 2000, [1, 2, 3])
    for rules, taken in (
        (AdmissionConfig(), (1, 2, 3)),
        (AdmissionConfig(prompt_only=True), (1, 2)),
        (AdmissionConfig(max_blocks=1), (1,)),
        (AdmissionConfig(min_hits=2), None),
    ):
        tiers = tiers_of(evolve(FAST, admission=rules))
        told = [] if taken is None else [Offloaded(5, "host", taken)]
        assert list(tiers.on_device(request, 0, 3, 5)) == told
    assert list(tiers.on_device(request, 0, 2, 6)) == [Offloaded(6, "host", (1, 2))]


def test_uses_count_for_a_tier_that_gets_what_is_evicted() -> None:
    tiers = tiers_of(evolve(HOST, admission=AdmissionConfig(min_hits=2)))
    assert use(tiers, [1, 2, 1]) == {"device": set(), "host": {1}}


def test_a_pinned_block_stays_and_a_tenant_makes_room_with_its_own() -> None:
    tiers = tiers_of(evolve(HOST, tenant_share=0.2))
    use(tiers, [1], retention=(KvRetention(pinned=True),))
    use(tiers, [2])
    kept = use(tiers, range(10, 16), tenant="a")
    assert kept["host"] == {14, 15}
    assert found(tiers, [1, 2]) == [1, 2]
    use(tiers, range(20, 40))
    assert found(tiers, [1, 2]) == [1]


def test_links_work_side_by_side_and_each_carries_one_load_after_the_other() -> None:
    tiers = tiers_of(
        HOST, sim_tier("disk", 100, 300, block_size=1000, latency_ns=50, write="on_evict")
    )
    use(tiers, range(12))  # 0 and 1 are on the disk
    assert tiers.load([11, 10], 1000) == Load(2, 1200)
    assert tiers.load([9, 8, 0, 1], 1100) == Load(4, 1750)
    assert tiers.load([0], 1100) == Load(1, 2050)


def test_what_is_faster_to_compute_is_loaded_once_and_then_computed() -> None:
    tiers = tiers_of(sim_tier("host", 10, 1001, block_size=1000, write="on_evict"))
    use(tiers, [1])
    assert tiers.load([1], 0) == Load(1, 1001), "its speed is not known"
    assert tiers.load([1], 5000) == Load()
    assert tiers.load([1], 31 * 10**9).blocks == 1, "it is measured again after a while"


def test_without_tiers_only_the_device_is_reported() -> None:
    tiers = tiers_of()
    assert use(tiers, [1, 2]) == {"device": set()}
    assert tiers.load([1], 0) == Load()
    assert tiers.clear([1], 7) == [Removed(7, "device", (1,))]


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match='no installed plugin offers the eviction "lfu"'):
        tiers_of(evolve(HOST, eviction=EvictionConfig(kind="lfu")))

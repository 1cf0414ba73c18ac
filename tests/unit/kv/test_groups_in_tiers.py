"""Tiers that hold several groups of KV: a load is of all that a boundary needs, or of nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.faults import damage
from tests.support.kv_rig import KvRig, setups
from tests.support.kv_tiers import DRAM, nvme

from commutator.contract.block import BlockStored
from commutator_engine_kit.kv import GroupChain, KvGroup, KvKind

GROUPS = (
    KvGroup(kind=KvKind.SLIDING, block_size=4, window=9, layers=("0", "1")),
    KvGroup(kind=KvKind.FULL, block_size=4, layers=("2",)),
    KvGroup(kind=KvKind.RECURRENT, block_size=8, layers=("3",)),
    KvGroup(kind=KvKind.CHUNKED, block_size=4, window=16, layers=("4",)),
)
TOKENS = range(100, 148)


def needed(boundary: int) -> list[tuple[int, int]]:
    """Group and number of each block at a boundary of TOKENS, counted token by token."""
    reads = [
        [at for at in range(boundary) if boundary - at < 9],
        list(range(boundary)),
        [boundary - 1],
        [at for at in range(boundary) if at // 16 == boundary // 16],
    ]
    found = [(group, at // GROUPS[group].block_size) for group in range(4) for at in reads[group]]
    return list(dict.fromkeys(found))


def chains(rig: KvRig, device_tokens: int = 0) -> list[GroupChain]:
    return [
        GroupChain(
            group=group,
            keys=rig.connector.lookups.keys(TOKENS, group=number),
            on_device=range(device_tokens // group.block_size),
        )
        for number, group in enumerate(GROUPS)
    ]


def store(rig: KvRig, places: Sequence[tuple[int, int]]) -> None:
    """Offload these blocks of TOKENS."""
    all_keys = [chain.keys for chain in chains(rig)]
    for group, number in places:
        keys = all_keys[group]
        offers = rig.connector.stores.descriptors(
            keys[: number + 1], TOKENS, first=number, group=group
        )
        rig.offload_as(offers)
    rig.settle()


def everything(until: int = 48) -> list[tuple[int, int]]:
    return [
        (group, number)
        for group, one in enumerate(GROUPS)
        for number in range(until // one.block_size)
    ]


def test_a_ticket_has_what_every_group_needs_at_its_boundary_and_no_more() -> None:
    with KvRig(setups(DRAM), blocks=80, groups=GROUPS) as rig:
        store(rig, everything())
        for limit in range(49):
            ticket, good = rig.load_groups(chains(rig), limit)
            assert good
            assert ticket.boundary == limit // 8 * 8
            assert sorted(ticket.places) == sorted(needed(ticket.boundary) if limit > 7 else [])
        stored = [event for event in rig.events if isinstance(event, BlockStored)]
        assert sum(len(event.block_hashes) for event in stored) == 12, "only the full group's"


@pytest.mark.parametrize("missing", everything())
def test_a_block_that_is_missing_in_one_group_lowers_the_boundary_for_all(
    missing: tuple[int, int],
) -> None:
    with KvRig(setups(DRAM), blocks=80, groups=GROUPS) as rig:
        store(rig, [place for place in everything() if place != missing])
        usable = [at for at in range(0, 49, 8) if not at or missing not in needed(at)]
        ticket, good = rig.load_groups(chains(rig), 48)
        assert good
        assert ticket.boundary == usable[-1]


def test_a_damaged_block_makes_all_others_of_its_load_useless_and_is_not_read_again(
    tmp_path: Path,
) -> None:
    setup = setups(nvme(tmp_path))[0]
    rng = random.Random(3)
    with KvRig([setup], blocks=80, groups=GROUPS) as rig:
        store(rig, everything())
        for group, number in rng.sample(needed(48), 6):
            key = chains(rig)[group].keys[number]
            (stored,) = setup.tier.lookup([key])
            assert stored is not None
            damage(setup.tier, stored, rng.randrange(stored.size_bytes))
            ticket, good = rig.load_groups(chains(rig), 48)
            assert (ticket.boundary, good) == (48, False)
            lower, good = rig.load_groups(chains(rig), 48)
            assert good
            assert lower.boundary < 48
            assert (group, number) not in lower.places
            store(rig, [(group, number)])
        rig.settle()


def test_device_and_tiers_serve_a_boundary_together() -> None:
    with KvRig(setups(DRAM), blocks=80, groups=GROUPS) as rig:
        store(rig, [place for place in everything() if place not in everything(24)])
        assert rig.load_groups(chains(rig), 48)[0].boundary == 0
        ticket, good = rig.load_groups(chains(rig, device_tokens=24), 48)
        assert good
        assert ticket.boundary == 48
        assert set(ticket.places) == set(needed(48)) - set(everything(24))


def test_what_was_stored_is_there_after_a_restart(tmp_path: Path) -> None:
    with KvRig(setups(nvme(tmp_path)), blocks=80, groups=GROUPS) as rig:
        store(rig, needed(40))
    with KvRig(setups(nvme(tmp_path)), blocks=80, groups=GROUPS) as rig:
        ticket, good = rig.load_groups(chains(rig), 48)
        assert (ticket.boundary, good) == (40, True)
    with KvRig(setups(nvme(tmp_path)), blocks=80) as rig:
        assert not rig.load(rig.connector.lookups.keys(TOKENS)), "it is not the model's own"


def test_groups_copy_up_what_the_boundary_needs(tmp_path: Path) -> None:
    tiers = setups(DRAM, nvme(tmp_path))
    with KvRig(setups(nvme(tmp_path)), blocks=80, groups=GROUPS) as rig:
        store(rig, everything())
    with KvRig(tiers, blocks=80, groups=GROUPS) as rig:
        rig.wait_for(rig.connector.lookups.prefetch_groups(chains(rig), 48).done)
        rig.settle()
        assert rig.stored("nvme", "dram") == len(needed(48))


def test_a_load_that_takes_longer_than_computing_is_not_begun() -> None:
    with KvRig(setups(DRAM), blocks=80, groups=GROUPS) as rig:
        store(rig, everything())
        rig.load_groups(chains(rig), 48)
        planned = rig.connector.lookups.plan_groups(chains(rig), 48, tokens_per_s=1e12)
        rig.wait_for(planned.done)
        assert planned.result().places == ()
        assert rig.tier("dram").not_loaded == {"slower than recompute": len(needed(48))}

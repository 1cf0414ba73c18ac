"""The KV service on real tiers: bytes come back as they were, or do not count as loaded."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tests.support.faults import damage
from tests.support.kv_rig import BLOCK_BYTES, KvRig, chain, folder_setup, setups, wait_for
from tests.support.kv_tiers import DRAM, ON_EVICT, nvme

from commutator.contract.block import BlockStored
from commutator_engine_kit.kv.block_manager.actions import JobUrgency
from commutator_engine_kit.kv.tiers.codecs import AesGcm, Lz4, Zstd
from commutator_engine_kit.kv.tiers.setup import TierSetup

KINDS: dict[str, Callable[[Path], TierSetup]] = {
    "dram": lambda _: setups(DRAM)[0],
    "nvme": lambda folder: setups(nvme(folder))[0],
    "framed files": lambda folder: folder_setup(folder, 64),
    "zstd in dram": lambda _: evolve(setups(DRAM)[0], codecs=(Zstd(),)),
    "lz4 on nvme": lambda folder: evolve(setups(nvme(folder))[0], codecs=(Lz4(),)),
    "sealed on nvme": lambda folder: evolve(
        setups(nvme(folder))[0], codecs=(Zstd(), AesGcm(bytes(32)))
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_stored_is_loaded_and_every_block_comes_back(kind: str, tmp_path: Path) -> None:
    setup = KINDS[kind](tmp_path / "blocks")
    keys = chain(1, 40)  # more than there is scratch memory for
    with KvRig([setup], blocks=100) as rig:
        rig.store(keys)
        assert rig.load(keys) == 40
        assert rig.load([*keys[:7], *chain(2, 1)]) == 7
        rig.settle()
        assert sorted(rig.free) == list(range(100))
        assert rig.stored("device", setup.name) == 40
        assert rig.tier(setup.name).loads == {"loaded": 47}
        stored = [event for event in rig.events if isinstance(event, BlockStored)]
        assert sum(len(event.block_hashes) for event in stored) == 40
        assert {event.medium for event in stored} == {setup.tier.medium}


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_byte_is_found_counted_and_concerns_its_own_block_only(
    kind: str, pieces: int, tmp_path: Path
) -> None:
    setup = KINDS[kind](tmp_path / "blocks")
    rng = random.Random(kind)
    with KvRig([setup], pieces=pieces) as rig:
        for attempt in range(12):
            keys = chain(attempt, 4)
            rig.store(keys)
            (stored,) = setup.tier.lookup(keys[2:3])
            assert stored is not None
            first_bytes = attempt * 11  # a header's, where there is one
            where = first_bytes if attempt < 6 else rng.randrange(stored.size_bytes)
            damage(setup.tier, stored, where)
            assert rig.load(keys) == 2, f"byte {where} was changed"
            assert rig.tier(setup.name).loads["corrupt"] == attempt + 1
            assert rig.tier(setup.name).removed["corrupt"] == attempt + 1
            assert rig.load(keys) == 2, "it is a miss from now on"
            rig.store(keys)
            assert rig.load(keys) == 4, "it was computed and stored again"
        rig.settle()


def test_what_a_tier_held_is_there_after_a_restart_unless_it_changed(tmp_path: Path) -> None:
    keys = chain(1, 8)
    with KvRig(setups(nvme(tmp_path))) as rig:
        rig.store(keys)
    with KvRig(setups(nvme(tmp_path))) as rig:
        assert rig.load(keys) == 8
    segment = tmp_path / "segment-00000"
    data = bytearray(segment.read_bytes())
    data[5 * BLOCK_BYTES + 77] ^= 4
    segment.write_bytes(data)
    with KvRig(setups(nvme(tmp_path))) as rig:
        assert rig.load(keys) < 8
        assert rig.tier("nvme").loads["corrupt"] == 1


def test_no_changed_byte_of_an_index_gives_a_wrong_block(tmp_path: Path) -> None:
    keys = chain(1, 3)
    with KvRig(setups(nvme(tmp_path, 4))) as rig:
        rig.store(keys)
    index = tmp_path / "index"
    whole = index.read_bytes()
    used = [place for place, byte in enumerate(whole) if byte]
    for where in random.Random(1).sample(used, 12):
        changed = bytearray(whole)
        changed[where] ^= 16
        index.write_bytes(changed)
        with KvRig(setups(nvme(tmp_path, 4))) as rig:
            assert rig.load(keys) <= 3  # the rig compares what was loaded
            rig.store(keys)
            assert rig.load(keys) == 3
        index.write_bytes(whole)


def test_the_engine_is_woken_without_any_lock(tmp_path: Path) -> None:
    rigs: list[KvRig] = []
    stuck: list[bool] = []

    def wake() -> None:
        for rig in rigs:
            asks = threading.Thread(target=rig.connector.statistics, daemon=True)
            asks.start()
            asks.join(5)
            stuck.append(asks.is_alive())

    with KvRig(setups(DRAM, nvme(tmp_path)), wake=wake) as rig:
        rigs.append(rig)
        rig.store(chain(1, 8))
        assert rig.load(chain(1, 8)) == 8
        rig.settle()
    assert stuck
    assert not any(stuck)


def test_evicted_blocks_move_down_and_come_back_from_there(tmp_path: Path) -> None:
    tiers = setups({**DRAM, "capacity": 16 * BLOCK_BYTES}, nvme(tmp_path, 32, **ON_EVICT))
    with KvRig(tiers) as rig:
        for number in range(6):
            rig.store(chain(number, 8))
        assert rig.stored("dram", "nvme") == 32
        assert rig.tier("dram").published == 16
        assert rig.tier("nvme").published == 32
        found = [rig.load(chain(number, 8)) for number in range(6)]
        assert found == [8] * 6
        rig.settle()
        assert rig.tier("nvme").loads == {"loaded": 32}


def test_blocks_move_down_through_three_tiers_at_once(tmp_path: Path) -> None:
    """Each tier waits for scratch memory that the others hold: none may wait on its thread."""
    tiers = setups(
        {**DRAM, "capacity": 48 * BLOCK_BYTES},
        nvme(tmp_path / "a", 48, **ON_EVICT),
        nvme(tmp_path / "b", 300, **ON_EVICT),
    )
    with KvRig(tiers, blocks=400) as rig:
        for number in range(4):
            rig.store(chain(number, 40))
        for number in range(10, 60):
            rig.offload(chain(number, 4))
            if number % 12 == 0:
                rig.settle()
        rig.settle()
        assert rig.stored("dram", "nvme") > 100
        assert rig.stored("nvme", "nvme-2") > 50
        assert [rig.load(chain(number, 40)) for number in range(2)] == [40, 40]
        rig.settle()


def test_on_evict_stores_what_the_device_is_about_to_forget() -> None:
    (setup,) = setups({**DRAM, **ON_EVICT})
    with KvRig([setup]) as rig:
        assert rig.connector.takes_evicted
        assert not rig.connector.takes_computed
        rig.store(chain(1, 4))
        assert rig.stored("device", "dram") == 0
        rig.offload(chain(1, 4), evicting=True)
        rig.settle()
        assert rig.load(chain(1, 4)) == 4


def test_a_dropped_load_that_waits_gives_its_blocks_back_at_once() -> None:
    (setup,) = setups(DRAM)
    gate = threading.Event()
    with KvRig([setup]) as rig:
        rig.store(chain(1, 4))
        _block_thread(rig, gate)
        load_id = rig.begin(chain(1, 4))
        assert load_id is not None
        rig.poll()
        assert load_id not in rig.finished
        rig.cancel(load_id)
        rig.poll()
        assert rig.finished == {load_id: 0}
        assert len(rig.free) == 64
        gate.set()
        rig.settle()
        assert rig.tier("dram").loads == {"not run": 4}
        assert rig.load(chain(1, 4)) == 4


def test_a_load_does_not_wait_for_ever_for_its_tiers_thread() -> None:
    (setup,) = setups({**DRAM, "load_timeout_s": 0.2})
    gate = threading.Event()
    with KvRig([setup]) as rig:
        rig.store(chain(1, 4))
        _block_thread(rig, gate)
        started_s = time.monotonic()
        assert rig.load(chain(1, 4)) == 0
        assert time.monotonic() - started_s < 5
        wait_for(lambda: len(rig.free) == 64)
        gate.set()
        wait_for(lambda: rig.tier("dram").up)
        assert rig.load(chain(1, 4)) == 4
        rig.settle()


def _block_thread(rig: KvRig, gate: threading.Event) -> None:
    """Keep the first tier's thread busy until the gate is opened."""
    busy = threading.Event()

    def job(_: object) -> Any:
        busy.set()
        gate.wait(30)
        yield from ()

    rig.connector.on_tier(0, JobUrgency.FREE, job)
    assert busy.wait(5)


def test_a_shared_tier_that_does_not_answer_holds_no_plan_up_for_long() -> None:
    (setup,) = setups(DRAM)
    setup.tier.shared = True
    gate = threading.Event()
    with KvRig([setup]) as rig:
        rig.store(chain(1, 4))
        _block_thread(rig, gate)
        asked = rig.connector.lookups.plan([*chain(1, 4), *chain(2, 4)], request_id="slow")
        unwanted = rig.connector.lookups.plan(chain(3, 4), request_id="unwanted")
        copied = rig.connector.lookups.prefetch(chain(4, 4))
        assert not asked.done()
        rig.connector.lookups.forget("unwanted")
        assert unwanted.cancelled()
        rig.wait_for(asked.done, 5)
        assert asked.result().blocks == 4, "what is known without asking"
        rig.wait_for(copied.done, 5)
        rig.connector.loads.cancel(asked.result())
        gate.set()
        rig.settle()
        assert not rig.connector.lookups._lookups


def test_a_plan_that_was_cancelled_keeps_no_block() -> None:
    (setup,) = setups(DRAM)
    setup.tier.shared = True
    gate = threading.Event()
    with KvRig([setup]) as rig:
        rig.store(chain(1, 4))
        _block_thread(rig, gate)
        asked = rig.connector.lookups.plan([*chain(1, 4), *chain(2, 4)])
        assert asked.cancel()
        gate.set()
        rig.wait_for(lambda: not rig.connector.lookups._lookups)
        rig.settle()
        assert rig.connector.statistics().loads_running == 0


def test_evicting_by_hand_reaches_what_is_being_stored() -> None:
    with KvRig(setups(DRAM)) as rig:
        rig.offload(chain(1, 16))
        rig.connector.stores.evict()
        rig.settle()
        assert rig.load(chain(1, 16)) == 0
        rig.store(chain(1, 16))
        rig.connector.stores.evict(chain(1, 16)[8:], "dram")
        assert rig.load(chain(1, 16)) == 8
        rig.settle()

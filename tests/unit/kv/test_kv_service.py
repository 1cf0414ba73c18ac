"""The KV service on real tiers: bytes come back as they were, whatever else happens."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tests.support.kv_rig import (
    BLOCK_BYTES,
    UNKNOWN_SPEED,
    KvRig,
    chain,
    folder_setup,
    setups,
    wait_for,
)

from commutator.errors import TierError
from commutator.kv import BlockRemoved, BlockStored
from commutator.kv.codec import AesGcm, Lz4, Zstd
from commutator.kv.guards import Breaker
from commutator.kv.tier import StorageTier
from commutator.kv.tier_setup import TierSetup
from commutator.kv.tier_thread import JobUrgency
from commutator.testing import FaultyIo, FaultyTier, IoFaults, TierFaults, damage
from commutator.transfer import Transfer, TransferAgent

DRAM = {"kind": "dram", "capacity": "1MB", "huge_pages": "off"}
ON_EVICT: dict[str, Any] = {"write": "on_evict"}


def nvme(folder: Path, blocks: int = 128, /, **options: Any) -> dict[str, Any]:
    size = blocks * BLOCK_BYTES
    return {"kind": "nvme", "path": str(folder), "capacity": size, **options}


def hanging(setup: TierSetup, **options: Any) -> TierSetup:
    faults = IoFaults(hang=1.0)
    return evolve(setup, wrap_io=lambda io: FaultyIo(io, faults, random.Random(0)), **options)


def faulty(setup: TierSetup, faults: TierFaults, **options: Any) -> TierSetup:
    tier = FaultyTier(setup.tier, faults, random.Random(0))
    return evolve(setup, tier=tier, **options)


def faults_of(setup: TierSetup, **faults: float) -> None:
    assert isinstance(setup.tier, FaultyTier)
    setup.tier.faults = TierFaults(**faults)


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


@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_byte_is_found_counted_and_concerns_its_own_block_only(
    kind: str, tmp_path: Path
) -> None:
    setup = KINDS[kind](tmp_path / "blocks")
    rng = random.Random(kind)
    with KvRig([setup]) as rig:
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
            asks = threading.Thread(target=rig.service.statistics, daemon=True)
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
            rig.offer(chain(number, 4))
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
        assert rig.service.takes_evicted
        assert not rig.service.takes_computed
        rig.store(chain(1, 4))
        assert rig.stored("device", "dram") == 0
        rig.offer(chain(1, 4), evicting=True)
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
        rig.service.drop(load_id)
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
        assert rig.load(chain(1, 4)) == 4
        rig.settle()


def _block_thread(rig: KvRig, gate: threading.Event) -> None:
    """Keep the first tier's thread busy until the gate is opened."""
    busy = threading.Event()

    def job(_: object) -> Any:
        busy.set()
        gate.wait(30)
        yield from ()

    rig.service.on_tier(0, JobUrgency.FREE, job)
    assert busy.wait(5)


def test_a_tier_that_hangs_costs_its_time_out_and_no_other_tiers_blocks(tmp_path: Path) -> None:
    first, second = setups(DRAM, nvme(tmp_path, load_timeout_s=0.2, store_timeout_s=0.3))
    with KvRig([first, hanging(second, breaker=Breaker(max_failures=1, pause_s=60))]) as rig:
        rig.store(chain(1, 4))
        assert rig.load(chain(1, 4)) == 4
        assert rig.stored("device", "dram") == 4
        assert rig.failed("device", "nvme") == {"write failed": 4}
        wait_for(lambda: not rig.tier("nvme").up)
        rig.store(chain(2, 4))
        assert rig.load(chain(2, 4)) == 4
        rig.settle()


def test_blocks_under_transfers_that_hang_come_back_when_those_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Transfer.done
    hang = threading.Event()

    def stuck(self: Transfer) -> bool:
        return not (hang.is_set() and self.request.backend == "POSIX") and done(self)

    monkeypatch.setattr(Transfer, "done", stuck)
    short: dict[str, Any] = {"load_timeout_s": 0.1, "store_timeout_s": 0.1, "max_failures": 100}
    tiers = setups({**DRAM, "capacity": 8 * BLOCK_BYTES}, nvme(tmp_path, **ON_EVICT, **short))
    with KvRig(tiers) as rig:
        rig.store(chain(1, 8))
        rig.store(chain(2, 8))
        assert rig.stored("dram", "nvme") == 8
        hang.set()
        assert rig.load(chain(1, 4)) == 0
        assert rig.load(chain(1, 4)) == 0, "of the same slots, which are then held twice"
        rig.offer(chain(3, 8))
        wait_for(lambda: rig.failed("dram", "nvme") == {"write failed": 8})
        rig.wait_for(lambda: rig.service.idle)
        assert len(rig.free) == 64 - 8, "what NIXL may still write to is not given back"
        hang.clear()
        rig.settle()
        assert len(rig.free) == 64
        assert rig.load(chain(1, 8)) == 8
        rig.settle()


def test_closing_waits_for_no_load_and_gives_no_block_twice(tmp_path: Path) -> None:
    (setup,) = setups(nvme(tmp_path, load_timeout_s=30))
    keys = chain(1, 8)
    with KvRig([setup]) as rig:
        rig.store(keys)
    (setup,) = setups(nvme(tmp_path, load_timeout_s=30))
    rig = KvRig([hanging(setup)])
    rig.begin(keys)
    started_s = time.monotonic()
    rig.close()
    assert time.monotonic() - started_s < 5
    rig.wait_for(lambda: len(rig.free) == 64)
    assert list(rig.finished.values()) == [0]
    assert rig.service.plan("late", keys, 0, UNKNOWN_SPEED) == 8
    rig.service.start_load("late", rig.free[:8])
    rig.service.offer([], [])
    assert len(rig.service.poll().released) == 8


def test_records_that_cannot_be_written_are_a_failed_store_and_the_tier_recovers() -> None:
    setup = faulty(setups(DRAM)[0], TierFaults(commit=1.0))
    with KvRig([setup]) as rig:
        for number in range(4):
            rig.store(chain(number, 4))
        assert rig.stored("device", "dram") == 0
        failed = dict(rig.failed("device", "dram"))
        assert failed.pop("not committed") >= 12
        assert set(failed) <= {"tier is down"}
        faults_of(setup)

        def stored() -> bool:
            rig.store(chain(9, 4))
            return rig.load(chain(9, 4)) == 4

        wait_for(stored)
        rig.settle()
        assert rig.tier("dram").up


def test_a_tier_with_an_index_that_is_gone_is_opened_anew(tmp_path: Path) -> None:
    with KvRig(setups(nvme(tmp_path))) as rig:
        rig.store(chain(1, 4))
        for file in tmp_path.iterdir():
            file.unlink()

        def stored() -> bool:
            rig.store(chain(2, 4))
            return (tmp_path / "index").exists() and rig.load(chain(2, 4)) == 4

        wait_for(stored)
        assert rig.load(chain(1, 4)) == 0
        assert rig.tier("nvme").removed["lost"] == 4
        rig.settle()
        assert any(isinstance(event, BlockRemoved) for event in rig.events)
    with KvRig(setups(nvme(tmp_path))) as rig:
        assert rig.load(chain(2, 4)) == 4


def test_blocks_that_a_tier_could_not_forget_are_forgotten_later() -> None:
    setup = faulty(setups({**DRAM, "capacity": 8 * BLOCK_BYTES})[0], TierFaults())
    with KvRig([setup]) as rig:
        rig.store(chain(1, 8))
        faults_of(setup, evict=1.0)
        rig.store(chain(2, 8))
        assert rig.load(chain(2, 8)) == 0
        assert rig.failed("device", "dram") == {"no free slot": 8}
        faults_of(setup)
        rig.store(chain(3, 8))
        assert rig.load(chain(3, 8)) == 8
        rig.store(chain(1, 8))
        assert rig.load(chain(1, 8)) == 8
        rig.settle()


def test_a_tier_that_comes_late_is_no_larger_than_it_is() -> None:
    setup = faulty(setups({**DRAM, "capacity": 8 * BLOCK_BYTES})[0], TierFaults(open=1.0))
    with KvRig([setup]) as rig:
        rig.store(chain(1, 4))
        assert rig.load(chain(1, 4)) == 0
        assert not rig.tier("dram").up
        faults_of(setup)
        wait_for(lambda: rig.tier("dram").up)
        assert rig.tier("dram").capacity == 8
        for number in range(5):
            rig.store(chain(number, 4))
            assert rig.load(chain(number, 4)) == 4
        assert rig.tier("dram").removed == {"evicted": 12}


def test_a_tier_whose_agent_cannot_be_made_is_opened_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems = [TierError("no NIXL today")]
    register = TransferAgent.register

    def failing(self: TransferAgent, *args: Any) -> None:
        if problems:
            raise problems.pop()
        register(self, *args)

    monkeypatch.setattr(TransferAgent, "register", failing)
    with KvRig(setups(DRAM)) as rig:
        assert not rig.tier("dram").up
        wait_for(lambda: rig.tier("dram").up)
        rig.store(chain(1, 4))
        assert rig.load(chain(1, 4)) == 4


def test_a_service_whose_tier_opens_too_late_starts_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (setup,) = setups(DRAM)
    go = threading.Event()
    opens = type(setup.tier).open

    def slow(self: StorageTier, geometry: Any) -> Any:
        go.wait(10)
        return opens(self, geometry)

    monkeypatch.setattr(type(setup.tier), "open", slow)
    with KvRig([setup], start=False) as rig:
        rig.service.start(timeout_s=0.05)
        rig.store(chain(1, 4))
        assert rig.load(chain(1, 4)) == 0
        go.set()
        wait_for(lambda: rig.tier("dram").up)
        rig.store(chain(1, 4))
        assert rig.load(chain(1, 4)) == 4


def test_evicting_by_hand_reaches_what_is_being_stored() -> None:
    with KvRig(setups(DRAM)) as rig:
        rig.offer(chain(1, 16))
        rig.service.evict()
        rig.settle()
        assert rig.load(chain(1, 16)) == 0
        rig.store(chain(1, 16))
        rig.service.evict(chain(1, 16)[8:], "dram")
        assert rig.load(chain(1, 16)) == 8
        rig.settle()

"""The KV service with tiers that hang, fail, come late or are gone: it goes on, and recovers."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.faults import TierFaults
from tests.support.kv_rig import BLOCK_BYTES, KvRig, chain, setups, wait_for
from tests.support.kv_tiers import DRAM, ON_EVICT, faults_of, faulty, hanging, nvme

from commutator.contract.block import BlockRemoved
from commutator.contract.tier import StorageTier
from commutator.errors import TierError
from commutator_engine_kit.kv.tiers.guards import Breaker
from commutator_engine_kit.nixl.agent import Transfer, TransferAgent


def disk_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[threading.Event, list[Transfer]]:
    """While the event is set, no transfer of a disk ends; and those that were looked at then."""
    done, hang = Transfer.done, threading.Event()
    stuck: list[Transfer] = []

    def state(self: Transfer) -> bool:
        if not (hang.is_set() and self.request.path.backend == "POSIX"):
            return done(self)
        if self not in stuck:
            stuck.append(self)
        return False

    monkeypatch.setattr(Transfer, "done", state)
    return hang, stuck


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
    hang, _ = disk_that_hangs(monkeypatch)
    short: dict[str, Any] = {"load_timeout_s": 0.1, "store_timeout_s": 0.1, "max_failures": 100}
    tiers = setups({**DRAM, "capacity": 8 * BLOCK_BYTES}, nvme(tmp_path, **ON_EVICT, **short))
    with KvRig(tiers) as rig:
        rig.store(chain(1, 8))
        rig.store(chain(2, 8))
        assert rig.stored("dram", "nvme") == 8
        hang.set()
        assert rig.load(chain(1, 4)) == 0
        assert rig.load(chain(1, 4)) == 0, "of the same slots, which are then held twice"
        rig.offload(chain(3, 8))
        wait_for(lambda: rig.failed("dram", "nvme") == {"write failed": 8})
        rig.wait_for(lambda: rig.connector.idle)
        assert len(rig.free) == 64 - 8, "what NIXL may still write to is not given back"
        hang.clear()
        rig.settle()
        assert len(rig.free) == 64
        assert rig.load(chain(1, 8)) == 8
        rig.settle()


@pytest.mark.parametrize("limit", ["load_timeout_s", "stall_timeout_s"])
def test_a_load_whose_thread_waits_in_the_kernel_is_given_up_and_the_tier_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """As under a disk that answers nothing: no time limit of the thread itself can end that."""
    done = Transfer.done
    answers = threading.Event()
    answers.set()

    def stuck(self: Transfer) -> bool:
        if self.request.path.backend == "POSIX":
            answers.wait()
        return done(self)

    monkeypatch.setattr(Transfer, "done", stuck)
    limits = {"load_timeout_s": 60.0, "stall_timeout_s": 60.0, limit: 0.2}
    with KvRig(setups(nvme(tmp_path, **limits))) as rig:
        rig.store(chain(1, 4))
        rig.settle()
        answers.clear()
        try:
            assert rig.load(chain(1, 4)) == 0
            assert not rig.tier("nvme").up, "nobody else waits for it"
            assert rig.load(chain(1, 4)) == 0
            assert len(rig.free) == 64 - 4, "what the disk may still write to is not given back"
        finally:
            answers.set()
        wait_for(lambda: rig.tier("nvme").up)
        rig.settle()
        assert len(rig.free) == 64
        assert rig.load(chain(1, 4)) == 4


def test_a_load_without_news_is_given_up_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, begun = disk_that_hangs(monkeypatch)
    with KvRig(setups(nvme(tmp_path, load_timeout_s=60.0, stall_timeout_s=0.2))) as rig:
        rig.store(chain(1, 4))
        rig.settle()
        hang.set()
        started_s = time.monotonic()
        assert rig.load(chain(1, 4)) == 0
        assert time.monotonic() - started_s < 30
        assert len(begun) == 1, "another try would wait as long again"
        hang.clear()
        rig.settle()
        assert rig.load(chain(1, 4)) == 4


def test_loads_wait_for_no_silent_store_and_the_tier_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may take its time to write; what waits behind that is computed meanwhile."""
    hang, _ = disk_that_hangs(monkeypatch)
    with KvRig(setups(nvme(tmp_path, load_timeout_s=60.0, stall_timeout_s=0.2))) as rig:
        rig.store(chain(1, 4))
        rig.settle()
        hang.set()
        rig.offload(chain(2, 4))
        assert rig.load(chain(1, 4)) == 0
        assert rig.tier("nvme").up
        hang.clear()
        rig.settle()
        assert rig.stored("device", "nvme") == 8
        assert rig.load(chain(1, 4)) == 4


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
    ticket = rig.plan(keys)
    assert ticket.blocks == 8
    with pytest.raises(TierError, match="closed"):
        rig.connector.loads.onboard(ticket, rig.free[:8])
    with pytest.raises(TierError, match="closed"):
        rig.offload(keys[:1])


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
        rig.connector.start(timeout_s=0.05)
        rig.store(chain(1, 4))
        assert rig.load(chain(1, 4)) == 0
        go.set()
        wait_for(lambda: rig.tier("dram").up)
        rig.store(chain(1, 4))
        assert rig.load(chain(1, 4)) == 4

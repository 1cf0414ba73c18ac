"""Tiers that raise what their contract does not allow: it costs their blocks, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tests.support.kv_rig import KvRig, chain, setups, wait_for
from tests.support.kv_tiers import DRAM, nvme

from commutator.contract.tier import UNBOUNDED, StoredBlock
from commutator_engine_kit.kv.admin import KvAdmin, LocatedPrompt
from commutator_engine_kit.kv.block_manager.actions import LoadResult
from commutator_engine_kit.kv.tiers.block_io import BlockIo, LoadBlock, StoreBlock, Unstored
from commutator_engine_kit.kv.tiers.guards import Breaker
from commutator_engine_kit.kv.tiers.mover import IoContext
from commutator_engine_kit.kv.tiers.setup import TierSetup

KEYS = chain(1, 3)
PEER: dict[str, Any] = {"kind": "peer", "ask_timeout_s": 5.0}


def setup_of(entry: dict[str, Any] = DRAM, **options: Any) -> TierSetup:
    """A tier that is not left alone, however often it fails."""
    return evolve(setups(entry)[0], breaker=Breaker(max_failures=1000), **options)


class Raises(BlockIo):
    def __init__(self, inner: BlockIo, what: str) -> None:
        self._inner, self._what = inner, what

    def store(
        self, blocks: Sequence[StoreBlock], context: IoContext
    ) -> list[StoredBlock | Unstored]:
        if self._what == "store":
            raise ValueError("boom")
        return self._inner.store(blocks, context)

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        if self._what == "load":
            raise ValueError("boom")
        return self._inner.load(blocks, context)[len(blocks) * (self._what == "forget") :]


@pytest.mark.parametrize("what", ["load", "forget"])
def test_what_a_load_raises_leaves_no_pin_and_every_block_comes_back(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    setup = setup_of({**DRAM, "max_attempts": 1}, wrap_io=lambda io: Raises(io, what))
    with KvRig([setup]) as rig:
        rig.store(KEYS)
        assert rig.load(KEYS) == 0
        rig.settle()
        assert len(rig.free) == 64
        assert rig.tier("dram").loads == {"failed": 3}
        assert setup.tier.statistics().pinned == 0
    assert len([r for r in caplog.records if "are not loaded" in r.message]) == 1


def test_what_a_store_raises_leaves_no_slot_reserved() -> None:
    setup = setup_of(wrap_io=lambda io: Raises(io, "store"))
    with KvRig([setup]) as rig:
        rig.store(KEYS)
        assert len(rig.free) == 64
        assert rig.failed("device", "dram") == {"write failed": 3}
        assert setup.tier.statistics().reserved == 0


@pytest.mark.parametrize("method", ["reserve", "commit"])
def test_a_tier_that_cannot_store_is_used_again_once_it_can(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of()
    with KvRig([setup]) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(setup.tier, method, _raise)
            rig.store(KEYS)
            assert setup.tier.statistics().reserved == 0
        rig.store(chain(2, 3))
        assert rig.load(chain(2, 3)) == 3
        rig.settle()


@pytest.mark.parametrize("method", ["lookup", "pin", "unpin"])
def test_a_tier_that_cannot_load_keeps_no_block_of_the_engine(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of()
    with KvRig([setup]) as rig:
        rig.store(KEYS)
        with monkeypatch.context() as patch:
            patch.setattr(setup.tier, method, _raise)
            assert rig.load(KEYS) == (3 if method == "unpin" else 0)
            rig.settle()
        assert len(rig.free) == 64
        rig.store(KEYS)
        assert rig.load(KEYS) == 3
        rig.settle()


def test_blocks_that_could_not_be_freed_are_when_they_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = setup_of()
    with KvRig([setup]) as rig:
        rig.store(KEYS)
        with monkeypatch.context() as patch:
            patch.setattr(setup.tier, "evict", _raise)
            rig.connector.stores.evict()
            rig.store(chain(3, 3))
            assert rig.load(chain(3, 3)) == 3
        rig.store(chain(2, 3))
        wait_for(lambda: setup.tier.statistics().committed == 6)


def test_a_medium_that_raises_when_asked_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaker = Breaker(max_failures=1, pause_s=0.05, max_pause_s=0.05)
    (setup,) = setups(nvme(tmp_path))
    setup.tier.shared = True
    with KvRig([evolve(setup, breaker=breaker)]) as rig:
        rig.store(KEYS)
        with monkeypatch.context() as patch:
            patch.setattr(setup.tier, "probe", _raise)
            assert rig.load(chain(2, 1)) == 0
            rig.wait_for(lambda: not rig.tier("nvme").up)
            rig.wait_for(lambda: rig.tier("nvme").up)
            assert rig.load(chain(2, 1)) == 0, "the trial after the pause"
        wait_for(lambda: rig.load([*KEYS, *chain(2, 1)]) == 3)
        rig.settle()


def test_a_tier_that_cannot_count_its_capacity_has_no_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = setup_of()
    monkeypatch.setattr(setup.tier, "statistics", _raise)
    with KvRig([setup]) as rig:
        rig.store(KEYS)
        assert rig.load(KEYS) == 3
        assert rig.tier("dram").capacity == UNBOUNDED
    assert "tier dram: cannot read its capacity" in caplog.text


def test_a_tier_that_cannot_list_its_blocks_answers_an_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = setup_of()
    with KvRig([setup]) as rig:
        rig.store(KEYS)
        admin = KvAdmin(rig.connector, lambda _: LocatedPrompt(KEYS, 0, 16))
        with monkeypatch.context() as patch:
            patch.setattr(setup.tier, "committed", _raise)
            assert [(tier.blocks, tier.bytes) for tier in admin.contents()] == [(3, None)]
            (verified,) = admin.verify()
            assert verified.problem == "the tier cannot list its blocks; see the worker's log"
        (verified,) = admin.verify()
        assert (verified.intact, verified.problem) == (3, None)


def test_a_tier_that_raises_before_it_is_opened_is_used_without_peers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = setup_of()
    monkeypatch.setattr(setup.tier, "use_peers", _raise)
    monkeypatch.setattr(type(setup.tier), "export_options", property(_raise))
    with KvRig([setup]) as rig:
        rig.store(KEYS)
        assert rig.load(KEYS) == 3
    for message in ("does not take the addresses of other workers", "so none are"):
        assert len([r for r in caplog.records if message in r.message]) == 1


@pytest.mark.parametrize("method", ["lookup", "pin", "unpin"])
def test_a_tier_that_raises_while_it_lends_is_closed_all_the_same(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of()
    with KvRig([setup, *setups(PEER)]) as lender, KvRig(setups(PEER)) as borrower:
        lender.store(KEYS)
        exchange = lender.connector.exchange
        assert exchange is not None
        assert exchange.address is not None
        borrower.connector.use_peers([exchange.address])
        monkeypatch.setattr(setup.tier, method, _raise)
        assert borrower.load(KEYS) == (3 if method == "unpin" else 0)
        borrower.settle()


def _raise(*_: object) -> Any:
    raise ValueError("boom")

"""Two KV services over real UCX: one loads blocks from the other's memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.support.faults import TierFaults
from tests.support.kv_rig import KvRig, chain, setups, wait_for
from tests.support.kv_tiers import DRAM, faults_of, faulty, nvme

PEER: dict[str, Any] = {"kind": "peer", "ask_timeout_s": 5.0}


def lender() -> KvRig:
    return KvRig(setups(DRAM, PEER))


def introduce(borrower: KvRig, *lenders: KvRig) -> None:
    addresses = []
    for rig in lenders:
        exchange = rig.connector.exchange
        assert exchange is not None
        assert exchange.address is not None
        addresses.append(exchange.address)
    borrower.connector.use_peers(addresses)


def test_what_lies_in_the_others_memory_is_loaded_again_and_again() -> None:
    keys = chain(1, 30)
    with lender() as first, KvRig(setups(PEER)) as second:
        assert second.load(keys) == 0, "it knows no peer"
        introduce(second, first)
        first.store(keys)
        assert second.load([*keys[:9], *chain(2, 3)]) == 9
        assert second.load(keys) == 30
        assert second.load(keys) == 30, "although what was read was given back"
        assert second.tier("peer").loads == {"loaded": 69}
        assert first.stored("device", "dram") == 30


@pytest.mark.parametrize(
    ("tiers", "warned"),
    [((PEER,), True), ((PEER, DRAM), False), ((PEER | {"listen": None},), False)],
)
def test_nothing_to_lend_is_reported(
    caplog: pytest.LogCaptureFixture, tiers: tuple[dict[str, Any], ...], warned: bool
) -> None:
    with KvRig(setups(*tiers)):
        told = [record for record in caplog.records if record.levelname == "WARNING"]
    assert ["blocks are not lent" in record.getMessage() for record in told] == [True] * warned


def test_what_the_other_forgot_meanwhile_is_missing() -> None:
    keys = chain(1, 8)
    with lender() as first, KvRig(setups(PEER)) as second:
        introduce(second, first)
        first.store(keys)
        assert second.load(keys) == 8
        first.connector.stores.evict()
        wait_for(lambda: first.tier("dram").published == 0)
        first.settle()
        assert second.load(keys) == 0
        assert second.tier("peer").loads == {"loaded": 8, "missing": 8}
        assert second.load(keys) == 0
        assert second.tier("peer").published == 0


def test_both_lend_and_borrow_and_store_nothing_in_each_other() -> None:
    mine, theirs = chain(1, 10), chain(2, 10)
    with lender() as first, lender() as second:
        introduce(first, second)
        introduce(second, first)
        first.store(mine)
        second.store(theirs)
        assert first.load(theirs) == 10
        assert second.load(mine) == 10
        assert first.load(mine) == 10
        assert first.tier("peer").loads == {"loaded": 10}
        assert {edge.target for edge in first.connector.statistics().edges} == {"dram"}


def test_blocks_in_another_encoding_are_not_used() -> None:
    keys = chain(1, 4)
    with (
        KvRig(setups({**DRAM, "compression": "zstd"}, {**PEER, "compression": "zstd"})) as first,
        KvRig(setups(PEER)) as plain,
        KvRig(setups({**PEER, "compression": "zstd"})) as same,
    ):
        first.store(keys)
        introduce(plain, first)
        introduce(same, first)
        assert plain.load(keys) == 0
        assert same.load(keys) == 4


def test_a_worker_without_memory_to_lend_only_borrows() -> None:
    with KvRig(setups(PEER)) as rig, KvRig(setups({**DRAM})) as other:
        assert rig.connector.exchange is not None
        assert rig.connector.exchange.address is None
        assert other.connector.exchange is None
    with KvRig(setups(DRAM, {**PEER, "listen": None})) as silent:
        assert silent.connector.exchange is not None
        assert silent.connector.exchange.address is None
    with KvRig(setups(DRAM, {**PEER, "listen": "tcp://192.0.2.1:9"})) as wrong:
        assert wrong.connector.exchange is not None
        assert wrong.connector.exchange.address is None, "an address of another machine"


def test_a_shared_tier_that_cannot_be_asked_is_left_alone_and_comes_back(tmp_path: Any) -> None:
    (plain,) = setups(nvme(tmp_path / "blocks"))
    plain.tier.shared = True
    setup = faulty(plain, TierFaults(), name="shared")
    strangers = (chain(number, 2) for number in itertools.count(10))
    with KvRig([setup]) as rig:
        keys = chain(1, 4)
        rig.store(keys)
        faults_of(setup, probe=1.0)
        rig.wait_for(lambda: rig.load(next(strangers)) or not rig.tier("shared").up)
        assert not rig.tier("shared").up
        faults_of(setup)
        rig.wait_for(lambda: rig.load(keys) == 4, 60.0)

"""The KV connector in another engine's process, with a real dram tier below."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from attrs import evolve
from tests.support.faults import damage
from tests.support.foreign_engine import IDENTITY, TIMEOUT_S, ForeignEngine, dram, prompt
from tests.support.kv_integrity import check_connector
from tests.support.kv_rig import wait_for

from commutator.contract.block import BlockStored
from commutator.errors import ConfigError


def test_what_was_stored_comes_back_into_other_blocks() -> None:
    with ForeignEngine(dram()) as engine:
        keys = engine.store(prompt(1, 4))
        plan = engine.plan(keys)
        good = engine.connector.loads.onboard(plan, [9, 3, 12, 5]).result(TIMEOUT_S)
        assert good == [True] * 4
        assert all(map(engine.holds, [9, 3, 12, 5], keys))


def test_a_plan_begins_after_what_the_engine_has() -> None:
    with ForeignEngine(dram()) as engine:
        keys = engine.store(prompt(1, 4))
        plan = engine.plan(keys, first=3)
        assert (plan.first, plan.blocks) == (3, 1)
        engine.connector.loads.cancel(plan)
        assert engine.plan(engine.connector.lookups.keys(prompt(2, 4))).blocks == 0


def test_a_part_of_a_plan_can_be_loaded() -> None:
    with ForeignEngine(dram()) as engine:
        keys = engine.store(prompt(1, 5))
        plan = engine.plan(keys)
        assert engine.connector.loads.onboard(plan, [8, 9], skip=2).result(TIMEOUT_S) == [
            True,
            True,
        ]
        assert engine.holds(8, keys[2])
        assert engine.holds(9, keys[3])
        check_connector(engine.connector)
        with pytest.raises(ValueError, match="5 blocks were planned"):
            engine.connector.loads.onboard(engine.plan(keys), [8, 9], skip=4)


def test_slow_loads_are_not_worth_it() -> None:
    with ForeignEngine(dram(max_bytes_per_s="20KB")) as engine:
        keys = engine.store(prompt(1, 4))
        assert engine.load(keys) == 4  # not measured yet
        fast = engine.connector.lookups.plan(keys, tokens_per_s=1e9).result(TIMEOUT_S)
        assert fast.blocks == 0
        slow = engine.connector.lookups.plan(keys, tokens_per_s=1e-3).result(TIMEOUT_S)
        assert slow.blocks == 4
        engine.connector.loads.cancel(slow)


def test_salts_adapters_and_names_have_keys_of_their_own() -> None:
    with ForeignEngine(dram()) as engine:
        lookups, tokens = engine.connector.lookups, prompt(1, 2)
        kinds = [
            lookups.keys(tokens)[0],
            lookups.keys(tokens, adapter="a")[0],
            lookups.keys(tokens, cache_salt="a")[0],
            lookups.key_of(b"page"),
            lookups.key_of(b"other page"),
        ]
        assert len(set(kinds)) == len(kinds)
    other = evolve(IDENTITY, layout="values then keys")
    with ForeignEngine(dram(), identity=other) as stranger:
        assert stranger.connector.lookups.keys(tokens)[0] != kinds[0]
        assert stranger.connector.lookups.key_of(b"page") != kinds[3]


def test_routers_hear_what_is_stored() -> None:
    with ForeignEngine(dram()) as engine:
        engine.store(prompt(7, 2))
        wait_for(lambda: engine.events)
        stored = [event for event in engine.events if isinstance(event, BlockStored)]
        assert [event.medium for event in stored] == ["CPU"]
        assert stored[0].token_ids == tuple(prompt(7, 2))
        assert engine.connector.poll().events == []


def test_what_is_evicted_first_gets_blocks_at_once() -> None:
    with ForeignEngine(dram(write="on_evict")) as engine:
        assert engine.load(engine.store(prompt(1, 3))) == 3


def test_what_is_used_twice_is_kept_where_only_evicted_blocks_are_offered() -> None:
    with ForeignEngine(dram(write="on_evict", admission={"min_hits": 2})) as engine:
        assert engine.load(engine.store(prompt(1, 3))) == 0
        engine.store(prompt(2, 3))
        assert engine.load(engine.store(prompt(1, 3))) == 3


def test_a_reset_forgets_everything() -> None:
    with ForeignEngine(dram()) as engine:
        keys = engine.store(prompt(1, 3))
        engine.connector.stores.evict(reason="reset")
        assert engine.plan(keys).blocks == 0


def test_a_damaged_block_and_what_comes_after_it_are_no_hits() -> None:
    with ForeignEngine(dram()) as engine:
        keys = engine.store(prompt(1, 4))
        (setup,) = engine.connector.tiers
        (stored,) = setup.tier.lookup([keys[2]])
        assert stored is not None
        damage(setup.tier, stored, 5)
        assert engine.load(keys) == 2
        assert engine.plan(keys).blocks == 2, "it is not offered again"


def test_news_are_announced() -> None:
    told = threading.Event()
    with ForeignEngine(dram(), wake=told.set) as engine:
        engine.store(prompt(1, 1))
        assert told.wait(TIMEOUT_S)


def test_mistakes_are_reported_with_their_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiers\[0\].capacitee"):
        ForeignEngine({"kind": "dram", "capacity": "1MB", "capacitee": 3})
    file = tmp_path / "cluster.yaml"
    file.write_text("engines: []\n")
    with pytest.raises(ConfigError, match="at least one tier"):
        ForeignEngine(file=file)


def test_a_whole_configuration_will_do(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("models: []\ntiers:\n  - kind: dram\n    capacity: 1MB\n")
    with ForeignEngine(file=file) as engine:
        assert engine.load(engine.store(prompt(1, 2))) == 2


def test_offers_and_blocks_must_be_as_many() -> None:
    with ForeignEngine(dram()) as engine:
        blocks = engine.connector.stores.descriptors(
            engine.connector.lookups.keys(prompt(1, 2)), prompt(1, 2)
        )
        with pytest.raises(ValueError, match="2 blocks"):
            engine.connector.stores.offload(blocks, [1])
        assert engine.connector.stores.offload([], []).done()


def test_everything_is_over_after_the_end() -> None:
    engine = ForeignEngine(dram(max_bytes_per_s="1KB"))
    with engine:
        keys = engine.connector.lookups.keys(prompt(1, 8))
        stored = engine.connector.stores.offload(
            engine.connector.stores.descriptors(keys, prompt(1, 8)), range(8)
        )
    assert stored.done()

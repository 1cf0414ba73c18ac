"""SGLang's pages in a real dram tier."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from attrs import evolve
from tests.support.faults import damage
from tests.support.foreign_engine import IDENTITY, ForeignEngine, dram
from tests.support.kv_integrity import check_connector

from commutator.errors import TierError
from commutator_engine_kit.kv.tier_stack import OnboardTicket
from commutator_sglang import hicache_pages
from commutator_sglang.hicache_pages import TierPages

NAMES = [f"{number:064x}" for number in range(5)]


def stored(engine: ForeignEngine, names: list[str], before: list[str] | None = None) -> TierPages:
    """Compute pages with these names into numbers 0, 1, ... and keep them."""
    pages = TierPages(engine.connector)
    for number, name in enumerate(names):
        engine.compute(number, name.encode())
    assert pages.store(names, range(len(names)), before or [])
    return pages


def holds(engine: ForeignEngine, numbers: list[int], names: list[str]) -> bool:
    return all(
        engine.holds(number, name.encode()) for number, name in zip(numbers, names, strict=True)
    )


def test_what_was_stored_is_found_and_loaded() -> None:
    with ForeignEngine(dram()) as engine:
        pages = stored(engine, NAMES)
        assert pages.found(NAMES) == 5
        assert pages.load(NAMES, [9, 3, 12, 5, 14]) == [True] * 5
        assert holds(engine, [9, 3, 12, 5, 14], NAMES)
        check_connector(engine.connector)
        assert engine.connector.idle, "a question keeps nothing"


def test_pages_after_one_that_is_missing_are_not_found() -> None:
    with ForeignEngine(dram()) as engine:
        pages = stored(engine, [*NAMES[:2], *NAMES[3:]])
        assert pages.found(NAMES) == 2
        assert pages.load(NAMES, [9, 10, 11, 12, 13]) == [True, True, False, False, False]
        assert holds(engine, [9, 10], NAMES[:2])
        assert pages.found(["f" * 64]) == 0
        assert pages.load(["f" * 64], [9]) == [False]


def test_a_chain_goes_on_where_the_last_batch_ended() -> None:
    with ForeignEngine(dram()) as engine:
        pages = stored(engine, NAMES[:2])
        stored(engine, NAMES[2:], before=NAMES[:2])
        assert pages.found(NAMES) == 5
        kept = engine.connector.lookups.explain(
            [engine.connector.lookups.key_of(name.encode()) for name in NAMES]
        )
        assert all(block.reusable for block in kept)


def test_a_damaged_page_and_those_after_it_are_misses() -> None:
    with ForeignEngine(dram()) as engine:
        pages = stored(engine, NAMES)
        (setup,) = engine.connector.tiers
        (block,) = setup.tier.lookup([engine.connector.lookups.key_of(NAMES[2].encode())])
        assert block is not None
        damage(setup.tier, block, 5)
        assert pages.load(NAMES, [9, 10, 11, 12, 13]) == [True, True, False, False, False]
        assert holds(engine, [9, 10], NAMES[:2])
        assert pages.found(NAMES) == 2, "it is not offered again"


def test_servers_that_differ_share_nothing() -> None:
    with (
        ForeignEngine(dram()) as engine,
        ForeignEngine(dram(), identity=evolve(IDENTITY, parallel_rank="tp 1/2")) as other,
    ):
        name = NAMES[0].encode()
        assert engine.connector.lookups.key_of(name) != other.connector.lookups.key_of(name)


def test_closed_tiers_keep_nothing() -> None:
    with ForeignEngine(dram()) as engine:
        pages = stored(engine, NAMES)
    assert not pages.store(NAMES, range(5), [])
    assert pages.load(NAMES, range(5)) == [False] * 5


def test_whatever_goes_wrong_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    with ForeignEngine(dram()) as engine:
        pages = stored(engine, NAMES)

        def fail(*_: object, **__: object) -> None:
            raise TierError("broken")

        monkeypatch.setattr(engine.connector.lookups, "plan", fail)
        monkeypatch.setattr(engine.connector.stores, "offload", fail)
        assert pages.found(NAMES) == 0
        assert pages.load(NAMES, range(5)) == [False] * 5
        assert not pages.store(NAMES, range(5), [])


def test_a_question_without_an_answer_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hicache_pages, "_PLAN_TIMEOUT_S", 0.01)
    with ForeignEngine(dram()) as engine:
        pages = stored(engine, NAMES)
        silent = Future[OnboardTicket]()
        monkeypatch.setattr(engine.connector.lookups, "plan", lambda _: silent)
        assert pages.found(NAMES) == 0
        assert silent.cancelled(), "nothing is kept for it"

"""The engine on a tiny model with storage tiers: the same answers, and no block is lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tests.support.faults import FaultyIo, FaultyTier, IoFaults, TierFaults
from tests.support.kv_rig import setups
from tests.support.reference_options import Sized, sized
from tests.support.tiered_engine import TieredEngine
from tests.support.tiny_llama import TINY, tiny_model

from commutator.contract.block import BlockKey
from commutator_engine_kit.kv.loads import Loads
from commutator_engine_kit.kv.tier_stack import OnboardTicket
from commutator_engine_kit.kv.tiers.guards import Breaker
from commutator_engine_kit.kv.tiers.setup import TierSetup

MODEL = tiny_model()
BLOCK_SIZE = 4
BLOCK_BYTES = TINY.kv_bytes(BLOCK_SIZE, MODEL.dtype.itemsize)
SLOT_BYTES = -(-BLOCK_BYTES // 4096) * 4096
NEW_TOKENS = 6


def prompt(number: int, length: int = 61) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, 95) for _ in range(length)]


PROMPTS = [prompt(number) for number in range(10)]


def options(num_blocks: int, **changes: Any) -> Sized:
    return sized(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_running_requests=16,
        max_tokens_per_step=128,
        **changes,
    )


def without_tiers(prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    with TieredEngine(MODEL, setups(dram(1)), options(1024, prefix_caching=False)) as plain:
        return plain.answers(prompts, new_tokens, at_once=1)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return without_tiers(PROMPTS)


def dram(blocks: int, **changes: Any) -> dict[str, Any]:
    return {"kind": "dram", "capacity": blocks * SLOT_BYTES, "huge_pages": "off", **changes}


def nvme(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"kind": "nvme", "path": str(folder), "capacity": "4MB", **changes}


def spoiled(
    setup: TierSetup,
    io: IoFaults,
    tier: TierFaults | None = None,
    store_timeout_s: float = 0.3,
) -> TierSetup:
    rng = random.Random(3)
    return evolve(
        setup,
        tier=FaultyTier(setup.tier, tier or TierFaults(), rng),
        wrap_io=lambda inner: FaultyIo(inner, io, rng),
        breaker=Breaker(max_failures=1000),
        config=evolve(setup.config, load_timeout_s=0.3, store_timeout_s=store_timeout_s),
    )


@pytest.mark.parametrize("at_once", [1, 4])
def test_blocks_come_back_from_every_tier_and_answers_stay_the_same(
    at_once: int, expected: list[list[int]], tmp_path: Path
) -> None:
    tiers = setups(dram(100), nvme(tmp_path, write="on_evict"))
    with TieredEngine(MODEL, tiers, options(72)) as tiered:
        said = tiered.answers(PROMPTS, NEW_TOKENS, at_once=at_once)
        assert said == expected
        tiered.until_settled()
        # Backwards: first what the arena still has, then the first tier, then the second.
        said = tiered.answers(PROMPTS[::-1], NEW_TOKENS, first_key=100, at_once=at_once)
        assert said == expected[::-1]
        tiered.until_settled()
        assert all(tiered.loaded().values()), tiered.loaded()
        cached = [tiered.said[key][0].cached_tokens or 0 for key in range(100, 110)]
        assert sum(cached) > 400


def test_preemption_with_tiers_changes_nothing(expected: list[list[int]], tmp_path: Path) -> None:
    tiers = setups(dram(40), nvme(tmp_path))
    with TieredEngine(MODEL, tiers, options(35)) as tiered:
        for round_ in range(3):
            said = tiered.answers(PROMPTS, NEW_TOKENS, first_key=100 * round_, at_once=10)
            assert said == expected
        # Two that fit at first and do not later.
        tiered.submit(900, prompt(50, 60), 40)
        tiered.submit(901, prompt(51, 60), 40)
        tiered.until_ended([900, 901])
        tiered.until_settled()
        assert tiered.engine.preemptions > 0
    wanted = without_tiers([prompt(50, 60), prompt(51, 60)], 40)
    assert [tiered.tokens(900), tiered.tokens(901)] == wanted


def load_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compute these few tokens may take less time than to load them."""
    plan = Loads.plan

    def everything(
        loads: Loads, request_id: str, keys: Sequence[BlockKey], first: int, _: float | None
    ) -> OnboardTicket:
        return plan(loads, request_id, keys, first, None)

    monkeypatch.setattr(Loads, "plan", everything)


def test_what_the_arena_forgets_is_stored_just_before(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_everything(monkeypatch)
    tiers = setups(dram(400, write="on_evict"))
    with TieredEngine(MODEL, tiers, options(72)) as tiered:
        assert tiered.answers(PROMPTS[:2], NEW_TOKENS, at_once=1) == expected[:2]
        tiered.until_settled()
        assert not tiered.connector.statistics().blocks, "there is room for all in the arena"
        for first_key in (100, 200):
            said = tiered.answers(PROMPTS, NEW_TOKENS, first_key=first_key, at_once=1)
            assert said == expected
            tiered.until_settled()
        assert tiered.loaded()["dram"] > 50


def test_a_request_aborted_while_it_is_loaded_gives_every_block_back(
    expected: list[list[int]], tmp_path: Path
) -> None:
    (setup,) = setups(nvme(tmp_path))
    with TieredEngine(MODEL, [setup], options(40)) as tiered:
        tiered.answers(PROMPTS[:4], NEW_TOKENS, at_once=1)
        tiered.until_settled()
    (setup,) = setups(nvme(tmp_path))
    with TieredEngine(MODEL, [spoiled(setup, IoFaults(hang=1.0))], options(40)) as tiered:
        tiered.submit(1, PROMPTS[0], NEW_TOKENS)
        tiered.step()
        assert tiered.engine.load().kv_used_blocks == 15
        tiered.engine.abort(1)
        tiered.until_settled(5)
        assert tiered.loaded() == {"nvme": 0}
        # One that is not aborted is computed once the load has failed.
        tiered.submit(2, PROMPTS[0], NEW_TOKENS)
        tiered.until_ended([2])
        assert tiered.tokens(2) == expected[0]
        assert 1 not in tiered.said


def test_a_request_may_be_aborted_and_come_again_at_any_step(
    expected: list[list[int]], tmp_path: Path
) -> None:
    tiers = [
        spoiled(setup, IoFaults(slow=0.5, slow_s=0.003))
        for setup in setups(dram(60), nvme(tmp_path))
    ]
    with TieredEngine(MODEL, tiers, options(40)) as tiered:
        rng = random.Random(4)
        for key in range(60):
            tiered.submit(key, PROMPTS[key % 5], NEW_TOKENS)
            for _ in range(rng.randrange(6)):
                tiered.step()
            tiered.engine.abort(key)
        assert tiered.answers(PROMPTS, NEW_TOKENS, first_key=100, at_once=3) == expected
        tiered.until_settled()


def test_tiers_that_fail_and_spoil_blocks_cost_time_but_no_answer(
    expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_everything(monkeypatch)
    io = IoFaults(fail=0.2, short=0.2, slow=0.1)
    faults = TierFaults(no_slot=0.1, commit=0.1, evict=0.1, corrupt=0.2, cut=0.1)
    tiers = [
        spoiled(setup, io, faults) for setup in setups(dram(40), nvme(tmp_path, write="on_evict"))
    ]
    with TieredEngine(MODEL, tiers, options(72)) as tiered:
        counts: Counter[str] = Counter()
        # How many loads come to be spoiled depends on the order of threads: some rounds see none.
        for round_ in range(50):
            said = tiered.answers(PROMPTS, NEW_TOKENS, first_key=100 * round_, at_once=3)
            assert said == expected
            tiered.until_settled()
            counts = Counter()
            for tier in tiered.connector.statistics().tiers:
                counts.update(tier.loads)
            if round_ >= 3 and counts["corrupt"] and counts["loaded"]:
                break
        assert counts["corrupt"] > 0
        assert counts["loaded"] > 0


def test_what_waits_to_be_offered_is_bounded_by_the_arena(tmp_path: Path) -> None:
    (setup,) = setups(nvme(tmp_path))
    hanging = spoiled(setup, IoFaults(hang=1.0), store_timeout_s=1.0)
    with TieredEngine(MODEL, [hanging], options(40)) as tiered:
        tiered.answers([prompt(number) for number in range(20, 40)], 1, at_once=1)
        tiering = tiered.engine._tiering
        assert tiering is not None
        assert len(tiering._offers) <= 40


def test_without_a_prefix_cache_tiers_are_left_alone(expected: list[list[int]]) -> None:
    with TieredEngine(MODEL, setups(dram(40)), options(72, prefix_caching=False)) as tiered:
        for first in (0, 100):
            said = tiered.answers(PROMPTS[:2], NEW_TOKENS, first_key=first, at_once=1)
            assert said == expected[:2]
        assert tiered.loaded() == {"dram": 0}

"""The retention that a request asks for reaches the tiers."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from typing import Any

from attrs import evolve
from tests.support.kv_rig import setups
from tests.support.reference_options import sized
from tests.support.tiered_engine import IDENTITY, TieredEngine
from tests.support.tiny_llama import TINY, tiny_model

from commutator.contract.block import RetentionHints
from commutator.contract.request import GenerateRequest, KvRetention, SamplingParams
from commutator_reference.scheduler import Sequence

MODEL = tiny_model()
BLOCK_SIZE = 4
SLOT_BYTES = -(-TINY.kv_bytes(BLOCK_SIZE, MODEL.dtype.itemsize) // 4096) * 4096
PROMPT = [number % 90 + 5 for number in range(41)]


def request(name: str, prompt: Many[int], *retention: KvRetention, **more: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    return GenerateRequest(
        request_id=name, token_ids=list(prompt), sampling=sampling, retention=retention, **more
    )


def engine(**dram: Any) -> TieredEngine:
    tier = {"kind": "dram", "capacity": 40 * SLOT_BYTES, "huge_pages": "off", **dram}
    return TieredEngine(MODEL, setups(tier), sized(num_blocks=32, block_size=BLOCK_SIZE))


def serve(tiered: TieredEngine, key: int, asked: GenerateRequest) -> None:
    tiered.engine.submit(key, asked)
    tiered.until_ended([key])
    deadline_s = time.monotonic() + 60
    while tiered.engine.storing:
        assert time.monotonic() < deadline_s, "blocks are not stored"
        tiered.step()
    tiered.until_settled()


def notes(tiered: TieredEngine, prompt: Many[int]) -> list[str]:
    """The notes on each block's copy in the tier."""
    base = evolve(IDENTITY, block_size=BLOCK_SIZE)
    sequence = Sequence.start(0, request("?", prompt), 0, 0, base)
    count = (len(prompt) - 1) // BLOCK_SIZE
    keys = [sequence.descriptor(index, BLOCK_SIZE).key for index in range(count)]
    whys = tiered.connector.lookups.explain(keys)
    return [" ".join(held.note.partition(", for")[0] for held in why.held) for why in whys]


def test_facts_of_a_sequence() -> None:
    kept = (
        KvRetention(priority=2, tokens=9),
        KvRetention(pinned=True, ttl_s=60.0, tokens=5),
        KvRetention(priority=-3),
    )
    asked = request("a", PROMPT[:14], *kept, cache_salt="t", generated_prefix=3)
    facts = [Sequence.start(0, asked, 0, 0).descriptor(index, 4).facts for index in range(3)]
    assert facts == [
        RetentionHints(pinned=True, ttl_s=60.0, depth=0, tenant="t"),
        RetentionHints(priority=2, depth=1, tenant="t"),
        RetentionHints(is_prompt=False, depth=2, tenant="t"),
    ]
    alone = request("b", PROMPT[:4], KvRetention(priority=-3))
    assert Sequence.start(0, alone, 0, 0).descriptor(0, 4).facts.priority == -3


def test_blocks_are_kept_as_asked_and_may_be_asked_for_later() -> None:
    with engine() as tiered:
        serve(tiered, 1, request("a", PROMPT))
        assert notes(tiered, PROMPT) == [""] * 10
        kept = KvRetention(priority=3, ttl_s=600.0, tokens=20)
        serve(tiered, 2, request("b", PROMPT, kept))
        assert notes(tiered, PROMPT) == ["priority 3"] * 5 + [""] * 5
        for key in range(10, 20):
            serve(tiered, key, request(str(key), [key + 30, *PROMPT]))
        assert notes(tiered, PROMPT)[:5] == ["priority 3"] * 5


def test_what_the_engine_holds_is_offered_with_what_was_asked_last() -> None:
    with engine(write="on_evict") as tiered:
        serve(tiered, 1, request("a", PROMPT))
        serve(tiered, 2, request("b", PROMPT, KvRetention(priority=3, tokens=20)))
        serve(tiered, 3, request("c", PROMPT, KvRetention(priority=1)))
        pool = tiered.engine.pool
        blocks = pool.oldest_cached(10)
        assert [pool.descriptor(block).facts.priority for block in blocks[::-1]] == [3] * 5 + [
            1
        ] * 5


def test_pinned_blocks_outlive_others() -> None:
    with engine() as tiered:
        serve(tiered, 1, request("a", PROMPT, KvRetention(pinned=True, ttl_s=600.0)))
        for key in range(10, 20):
            serve(tiered, key, request(str(key), [key + 30, *PROMPT]))
        assert notes(tiered, PROMPT) == ["pinned"] * 10
        assert tiered.connector.statistics().tiers[0].retained == 10


def test_admission_by_place_and_by_origin_sees_where_blocks_stand() -> None:
    with engine(admission={"max_blocks": 3}) as tiered:
        serve(tiered, 1, request("a", PROMPT))
        edge = tiered.connector.statistics().edge("device", "dram")
        assert edge.stored == 3
        assert edge.not_admitted == {"too deep in its chain": 7}
    with engine(admission={"prompt_only": True}) as tiered:
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        serve(tiered, 1, evolve(request("a", PROMPT), sampling=sampling))
        edge = tiered.connector.statistics().edge("device", "dram")
        assert edge.stored == 10
        assert sum(edge.not_admitted.values()) == 3

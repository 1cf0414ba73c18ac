"""What routers count on is what the engine finds, in models with several kinds of KV."""

from __future__ import annotations

from random import Random

import pytest
from tests.support.grouped_models import VOCABULARY, grouped_model
from tests.support.reference_options import sized

from commutator import GenerateRequest, SamplingParams
from commutator.contract.block import EventBatch
from commutator.kv_events.codec import decode_batch, encode_batch
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.index import PrefixIndex
from commutator_reference.engine import ReferenceEngine

SAMPLING = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


def longest_run(index: PrefixIndex, hashes: list[int]) -> int:
    """What an index that follows one group alone would count, in blocks."""
    held = [index.holds("w", each) for each in hashes]
    return held.index(False) if False in held else len(held)


@pytest.mark.parametrize("family", ["gemma3", "llama4", "qwen3_next", "deepseek_v2"])
def test_a_router_counts_on_what_the_engine_finds(family: str) -> None:
    model = grouped_model(family)
    plan = model.pages(8)
    size, groups = plan.block_size, len(plan.groups)
    # The smallest blocks of a router: two in each of the engine's.
    index = PrefixIndex(size // 2)

    def told(events: object) -> None:
        batch = EventBatch(timestamp_s=0.0, events=tuple(events))  # type: ignore[arg-type]
        for event in decode_batch(encode_batch(batch)).events:
            index.apply("w", event)

    engine = ReferenceEngine(
        model,
        sized(num_blocks=30 * groups, block_size=8, max_tokens_per_step=3 * size)[0],
        30 * groups,
        on_kv_events=told,
    )
    random, texts, over = Random(3), [[0]], 0
    hits = []
    for number in range(30):
        old = random.choice(texts)
        cut = random.randint(0, len(old))
        fresh = random.choices(range(3, VOCABULARY), k=random.randint(4, 12 * size))
        prompt = (old[:cut] + fresh)[: 14 * size]
        prompt += [3] * (len(prompt) % size == 0)  # the last token is always computed
        texts.append(prompt)
        hashes = sequence_hashes(prompt, size // 2)
        counted = sum(each.blocks for each in index.match(hashes).values()) * (size // 2)
        over += longest_run(index, hashes) * (size // 2) > counted
        engine.submit(
            number, GenerateRequest(request_id=str(number), token_ids=prompt, sampling=SAMPLING)
        )
        found = []
        while engine.load().running or engine.load().waiting:
            found += [delta.cached_tokens for _, delta in engine.step()]
        assert found[0] == counted // size * size, (number, len(prompt))
        hits.append(found[0])
    assert sum(map(bool, hits)) > 10
    if any(not group.keeps_prefix for group in plan.groups):
        assert over > 5, "one group alone would have done"

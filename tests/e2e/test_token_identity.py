"""The reference engine's greedy tokens equal transformers', token for token, in float32.

transformers reads the same GGUF file with a loader and a model of its own, so an error in either
shows. Each mode of the engine must give the very same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.e2e.identity_prompts import PROMPTS
from tests.support.oracle import SOURCE, greedy
from tests.support.reference_integrity import check_engine
from tests.support.reference_options import sized

from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.tokenizer.load import load_text_model, locate_model
from commutator_reference.engine import ReferenceEngine
from commutator_reference.model import LlamaModel, load_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]  # prompts of 3,000 tokens, on a CPU

NEW_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    text = load_text_model(SOURCE)
    return [text.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations by transformers, one prompt at a time."""
    return [greedy(ids, NEW_TOKENS) for ids in prompts]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return load_model(locate_model(SOURCE))


def run(
    engine: ReferenceEngine, prompts: Sequence[Sequence[int]], at_once: int
) -> tuple[list[list[int]], int]:
    """The tokens of each prompt, ``at_once`` of them running together; and tokens from a cache."""
    made: dict[int, list[int]] = {key: [] for key in range(len(prompts))}
    waiting, running, cached = list(made), set[int](), 0
    while waiting or running:
        while waiting and len(running) < at_once:
            key = waiting.pop(0)
            engine.submit(
                key, GenerateRequest(request_id=str(key), token_ids=prompts[key], sampling=GREEDY)
            )
            running.add(key)
        for key, delta in engine.step():
            assert delta.error is None
            made[key] += delta.token_ids
            cached += delta.cached_tokens or 0
            if delta.finish_reason is not None:
                running.discard(key)
    check_engine(engine)
    assert engine.load().kv_used_blocks == 0
    return list(made.values()), cached


def make_engine(model: LlamaModel, **options: Any) -> ReferenceEngine:
    return ReferenceEngine(model, *sized(**{"num_blocks": 400, **options}))


def test_one_at_a_time(
    model: LlamaModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = make_engine(model, prefix_caching=False)
    assert run(engine, prompts, at_once=1) == (expected, 0)


@pytest.mark.proves("reference", "the right greedy tokens", how="real engine on CPU")
def test_batched(model: LlamaModel, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = make_engine(model, prefix_caching=False)
    assert run(engine, prompts, at_once=16) == (expected, 0)


def test_chunked_prefill(
    model: LlamaModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = make_engine(
        model, prefix_caching=False, max_running_requests=8, max_tokens_per_step=37
    )
    assert run(engine, prompts, at_once=8) == (expected, 0)


def test_prefix_hits(
    model: LlamaModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = make_engine(model)
    assert run(engine, prompts, at_once=8)[0] == expected
    again, cached = run(engine, prompts, at_once=8)
    assert again == expected
    assert cached > 0.5 * sum(map(len, prompts))


def test_preemption(model: LlamaModel, prompts: list[list[int]], expected: list[list[int]]) -> None:
    longest = max(map(len, prompts)) + NEW_TOKENS
    engine = make_engine(model, num_blocks=longest // 16 + 2)
    assert run(engine, prompts, at_once=16)[0] == expected
    assert engine.preemptions > 0

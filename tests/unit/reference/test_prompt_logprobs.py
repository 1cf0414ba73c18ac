"""Log probabilities of prompts: those of one pass over the whole prompt, however it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.reference_integrity import check_engine
from tests.support.reference_options import sized
from tests.support.tiny_llama import TINY, tiny_model

from commutator.contract.request import GenerateRequest, SamplingParams, TokenDelta, TokenLogprob
from commutator.errors import RequestError
from commutator_reference.arena import KVArena
from commutator_reference.engine import ReferenceEngine
from commutator_reference.model import build_batch
from commutator_reference.sampler import OPTIONS, forbid
from commutator_reference.scheduler import Chunk

MODEL = tiny_model()
PROMPTS = st.lists(
    st.lists(st.integers(3, TINY.vocab_size - 1), min_size=1, max_size=20), min_size=1, max_size=3
)


def engine(max_tokens: int = 128, *, num_blocks: int = 128) -> ReferenceEngine:
    options = sized(
        num_blocks=num_blocks, block_size=4, max_running_requests=8, max_tokens_per_step=max_tokens
    )
    return ReferenceEngine(
        MODEL,
        *options,
        decode=lambda ids: " ".join(map(str, ids)),
        encode=lambda text: [int(word) for word in text.split()],
    )


def request(prompt: Sequence[int], top: int | None = 3, **more: Any) -> GenerateRequest:
    options: Mapping[str, Any] = more.pop("options", {})
    params = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True, **more}
    sampling = SamplingParams(**params)
    return GenerateRequest(
        request_id="r", token_ids=prompt, sampling=sampling, prompt_logprobs=top, options=options
    )


def run(made: ReferenceEngine, requests: Sequence[GenerateRequest]) -> list[list[TokenDelta]]:
    for key, one in enumerate(requests):
        made.submit(key, one)
    said: list[list[TokenDelta]] = [[] for _ in requests]
    while (load := made.load()).running + load.waiting:
        for key, delta in made.step():
            said[key].append(delta)
        check_engine(made)
    return said


def naive(ids: Sequence[int]) -> torch.Tensor:
    """Log probabilities after each token, [tokens, vocabulary]; each pass ends with one of them."""
    rows = []
    for end in range(1, len(ids) + 1):
        arena = KVArena(TINY, 1, end, device=MODEL.device, dtype=MODEL.dtype)
        batch = build_batch([Chunk(0, tuple(ids[:end]), 0, (0,), samples=True)], arena, MODEL.dtype)
        rows.append(torch.log_softmax(MODEL.forward(batch, arena)[0], dim=-1))
    return torch.stack(rows)


def check(prompt: Sequence[int], entries: Sequence[TokenLogprob], top: int) -> None:
    assert [entry.token_id for entry in entries] == [*prompt[1:]]
    expected = naive(prompt)
    for entry, row in zip(entries, expected, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        best = row.topk(top)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@settings(max_examples=20)
@given(prompts=PROMPTS, max_tokens=st.integers(8, 64), top=st.integers(0, 5))
def test_they_are_the_same_in_any_batch_and_any_chunks(
    prompts: list[list[int]], max_tokens: int, top: int
) -> None:
    for deltas, prompt in zip(
        run(engine(max_tokens), [request(one, top) for one in prompts]), prompts, strict=True
    ):
        check(prompt, deltas[0].prompt_logprobs, top)
        assert not any(delta.prompt_logprobs for delta in deltas[1:])


def test_a_cached_prompt_is_computed_again_and_serves_others() -> None:
    made, prompt = engine(), [(5 * i) % 90 + 3 for i in range(33)]
    (plain,) = run(made, [request(prompt, None)])
    (scored,) = run(made, [request(prompt, 2)])
    (again,) = run(made, [request(prompt, None)])
    assert (plain[0].cached_tokens, scored[0].cached_tokens, again[0].cached_tokens) == (0, 0, 32)
    check(prompt, scored[0].prompt_logprobs, 2)
    assert [d.token_ids for d in plain] == [d.token_ids for d in scored]


def test_a_prompt_that_lost_its_blocks_is_scored_whole() -> None:
    """The pool is too small for both, and the urgent one comes while the other is computed."""
    made, prompt = engine(8, num_blocks=14), [(7 * i) % 90 + 3 for i in range(40)]
    made.submit(0, evolve(request(prompt, 1), priority=1))
    made.step()
    made.submit(1, evolve(request(prompt[::-1], 1), priority=0))
    said: dict[int, list[TokenDelta]] = {0: [], 1: []}
    while (load := made.load()).running + load.waiting:
        for key, delta in made.step():
            said[key].append(delta)
    check(prompt, said[0][0].prompt_logprobs, 1)
    check(prompt[::-1], said[1][0].prompt_logprobs, 1)


def test_of_an_answer_that_another_worker_began_there_are_none() -> None:
    asked = evolve(request([5, 6, 7, 8], None, max_tokens=4), generated_prefix=2)
    ((first, *_),) = run(engine(), [asked])
    assert first.prompt_logprobs == ()


def test_only_allowed_tokens_and_no_bad_words() -> None:
    (plain,) = run(engine(), [request([5, 6, 7], None)])
    first = plain[0].token_ids[0]
    (allowed,) = run(engine(), [request([5, 6, 7], None, options={"allowed_token_ids": [11, 12]})])
    assert {token for delta in allowed for token in delta.token_ids} <= {11, 12}
    (without,) = run(engine(), [request([5, 6, 7], None, options={"bad_words": [str(first)]})])
    assert first not in {token for delta in without for token in delta.token_ids}


def test_named_tokens_take_the_place_of_the_likeliest() -> None:
    asked = request([5, 6, 7], None, top_logprobs=2, options={"logprob_token_ids": [90, 3]})
    (deltas,) = run(engine(), [asked])
    (entry,) = deltas[0].logprobs
    assert {token for token, _ in entry.top} == {90, 3}
    row = naive([5, 6, 7])[-1]
    assert dict(entry.top)[90] == pytest.approx(float(row[90]), abs=1e-4)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"options": {"allowed_token_ids": [TINY.vocab_size]}}, "allowed_token_ids"),
        ({"options": {"logprob_token_ids": [TINY.vocab_size]}}, "logprob_token_ids"),
        ({"top": -1}, "prompt_logprobs"),
        ({"top": 5000}, "prompt_logprobs"),
    ],
)
def test_what_is_out_of_the_vocabulary_is_refused(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        engine().submit(0, request([5, 6], **wrong))
    assert refused.value.param == param


@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4),
    output=st.lists(st.integers(0, 3), max_size=5),
)
def test_a_token_is_forbidden_exactly_where_it_would_complete_a_word(
    words: list[list[int]], output: list[int]
) -> None:
    left = forbid(torch.zeros(4), words, output)
    for token in range(4):
        said = [*output, token]
        ends = any(len(word) <= len(said) and said[-len(word) :] == word for word in words)
        assert (float(left[token]) == -torch.inf) == ends


def test_options_say_what_is_legal() -> None:
    assert OPTIONS["bad_words"].problem(["x"]) is None
    assert OPTIONS["allowed_token_ids"].problem([-1]) is not None

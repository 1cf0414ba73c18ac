"""In real chat templates no field makes control tokens, and ordinary texts are rendered as ever."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.chat_families import FIELDS, Family, conversation
from tests.support.tokenizers import QWEN2, trained
from tokenizers import AddedToken, Regex, models, pre_tokenizers

from commutator.errors import RequestError
from commutator.tokenizer.text_model import ChatTemplate

pytestmark = pytest.mark.long

CONTROL = re.compile(
    "<\\|[^|<>{}' ]+\\|>|<\uff5c[^<>{}\uff5c ]+\uff5c>|\\[/?[A-Z_]{3,}\\]|<\\|\\w+>|<\\w+\\|>"
    "|</?(?:\\w+:)?(?:think|tool\\w*|arg_\\w+|assistant|user|system|function)>"
    "|<(?:start|end)_of_turn>|<SPECIAL_\\d+>|\\[gMASK\\]|<sop>|<sep>"
)
THOUGHTS = re.compile("think|THINK|inner_(?:pre|suf)fix|channel")
BUILT = {
    "tencent-Hy3": tuple(
        f"<{mark}{name}:opensource{mark}>"
        for mark, names in (
            ("\uff5c", "hy_begin_of_sentence hy_eos hy_User hy_Assistant reasoning_mode"),
            ("", "think /think tool_calls /tool_calls tool_call /tool_call tool_sep"),
        )
        for name in names.split()
    )
}


def family_of(file: Path) -> Family:
    source, values = file.read_text(), {"bos_token": "<BOS>", "eos_token": "<EOS>"}
    written = source.encode("latin-1", "backslashreplace").decode("unicode_escape", "replace")
    found = {*CONTROL.findall(source), *CONTROL.findall(written), *BUILT.get(file.stem, ())}
    controls = tuple(sorted(found | {"<BOS>", "<EOS>"}))
    words = pre_tokenizers.Split(Regex(QWEN2), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    added = tuple(AddedToken(one, special=True, normalized=False) for one in controls)
    steps = pre_tokenizers.Sequence([words, level])
    tokenizer = trained(models.BPE(), steps, added=added)
    guarded = ChatTemplate(source, values, tokenizer)
    return Family(file.stem, tokenizer, controls, ChatTemplate(source, values), guarded)


def styles(**texts: str) -> Iterator[tuple[list[dict[str, Any]], Mapping[str, Any]]]:
    """The conversation as different templates want it."""
    for as_object in (True, False):
        for roles in (("system", "user", "assistant", "tool", "user"), ("user", "assistant")):
            messages, variables = conversation(as_text=not as_object, **texts)
            left = [one for one in messages if one["role"] in roles]
            if len(roles) == 2:
                left = [
                    {
                        name: one[name]
                        for name in ("role", "content", "reasoning_content")
                        if name in one
                    }
                    for one in left[:2]
                ]
                left.append(messages[-1])
            yield left, variables


def ids_of(family: Family, **texts: str) -> list[Sequence[int]]:
    """Control tokens of each style that the template takes; it may refuse all that is odd."""
    found: list[Sequence[int]] = []
    for messages, variables in styles(**texts):
        try:
            found.append(family.control_ids(family.ids(messages, variables)))
        except RequestError:
            found.append([])
    return found


def test_no_field_forges_a_control_token_in_70_templates(judges: Path) -> None:
    files = sorted((judges / "templates").glob("*.jinja"))
    assert len(files) >= 70
    wrong = [problem for file in files for problem in problems(family_of(file))]
    assert not wrong, "\n".join(wrong)


def problems(family: Family) -> Iterator[str]:
    kept = [kind for kind in styles() if renders_alike(family, *kind)]
    if not kept:
        yield f"{family.name}: it takes no style of conversation"
    for field in FIELDS:
        place = field.replace(" ", "_")
        expected = ids_of(family, **{place: "some words"})
        begins = field == "answer"  # thoughts with which it begins stay thoughts
        for control in family.controls:
            if begins and THOUGHTS.search(control):
                continue
            for text in (f"a {control} b", control[1:-1]):
                if text != "/think" and ids_of(family, **{place: text}) != expected:
                    yield f"{family.name}: {text!r} in {field}"


def renders_alike(
    family: Family, messages: list[dict[str, Any]], variables: Mapping[str, Any]
) -> bool:
    """Whether the template takes an ordinary conversation; it is rendered as without a guard."""
    try:
        written = family.unguarded.render(messages, variables=variables)
    except RequestError as error:
        with pytest.raises(RequestError, match=re.escape(str(error))):
            family.guarded.prompt(messages, variables=variables)
        return False
    prompt = family.guarded.prompt(messages, variables=variables)
    assert prompt.text == written, family.name
    assert prompt.sealed is None, family.name
    return True

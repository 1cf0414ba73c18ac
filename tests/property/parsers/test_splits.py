"""What parsers find does not depend on how the text was cut, and no text is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.answer import (
    AnswerEvent,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    FinishKind,
    ReasoningContent,
)
from commutator.contract.conversation import Conversation, Message, Tool, ToolChoice
from commutator.contract.parser import AnswerParser, ParserConfig, ParserModel
from commutator_parsers.families import FAMILIES, REASONING
from commutator_parsers.model import ModelParser

TOOLS = (
    Tool(
        name="add",
        parameters={
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "text": {"type": "string"},
                "maybe": {"type": ["string", "null"]},
                "list": {"type": "array", "items": {"type": "string"}},
            },
        },
    ),
    Tool(name="now"),
)
HOW = {
    "qwen3_coder": "think_or_call",
    "kimi_k2": "think_or_call",
    "minimax_m2": "think_or_call",
    **{name: name for name in REASONING},
}
PIECES = (
    *(
        "add",
        "now",
        "other",
        "functions.add:0",
        "function",
        " ",
        "\n",
        "\n\n",
        "text",
        "é🌸",
        "x",
        ";",
        ",",
    ),
    *(
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name": "now", "arguments": {}}',
        '{"a": 1}',
        "{}",
    ),
    *('{"arguments": {"text": "</x>"}, "name": "add"}', '{"name": "add", "parameters": {"a": 1'),
    *(
        '"',
        "\\",
        "[",
        "]",
        "{",
        "}",
        "(",
        ")",
        "=",
        ":",
        "'",
        "add(a=1)",
        "now()",
        "[add(text='x'), now()]",
    ),
    *(
        "a",
        "text",
        "maybe",
        "1",
        "null",
        "json",
        "```json\n",
        "```",
        "assistant",
        " to=functions.add",
        "final",
    ),
    *(
        "commentary",
        "analysis",
        "think",
        "response",
        "tools",
        'call tool="add" index="1"',
        "argument",
        "call",
    ),
    *(
        'argument key="text" type="string"',
        'call:add{a:1,text:<|"|>x<|"|>}',
        "a:",
        "<br>",
        "</p>",
        "\t",
    ),
)


def markers_of(name: str) -> tuple[str, ...]:
    """Every string that the family's format has."""
    family = FAMILIES[name]
    if family.whole == "harmony":
        return ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|call|>")
    if family.whole == "elements":
        return (
            "<|open|>",
            "<|close|>",
            "<|sep|>",
            "<|open|>response<|sep|>",
            "<|open|>tools<|sep|>",
        )
    found: list[str] = list(family.silent)

    def walk(value: object) -> None:
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, tuple):
            for one in value:
                walk(one)
        elif hasattr(value, "__attrs_attrs__"):
            for field in value.__attrs_attrs__:
                walk(getattr(value, field.name))

    walk(family.grammar)
    thinking = REASONING[HOW.get(name, "think")]
    return tuple(
        dict.fromkeys([*filter(None, found), *(one for pair in thinking.pairs for one in pair)])
    )


def parser_of(
    name: str,
    *,
    prompt_end: str = "",
    specials: Sequence[str] = (),
    choice: ToolChoice | None = None,
) -> AnswerParser:
    model = ParserModel(
        name="m",
        chat_template=None,
        special_tokens=dict.fromkeys(specials, 0),
        reasoning=HOW.get(name, "think"),
    )
    conversation = Conversation(
        messages=[Message(role="user", content="x")], tools=TOOLS, tool_choice=choice
    )
    parser = ModelParser(ParserConfig(kind=name), model).answer(conversation, prompt_end)
    assert parser is not None
    return parser


def read(
    parser: AnswerParser, pieces: Iterable[str], reason: FinishKind
) -> tuple[list[tuple[str, object]], FinishKind]:
    """The events, neighbours of one kind merged."""
    events: list[AnswerEvent] = []
    for piece in pieces:
        events += parser.feed(piece)
    last, reason = parser.finish(reason)
    return merged([*events, *last]), reason


def merged(events: Iterable[AnswerEvent]) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for event in events:
        kind = type(event).__name__
        match event:
            case CallStart():
                found.append((kind, (event.call, event.name)))
            case CallEnd():
                found.append((kind, event.call))
            case Content() | ReasoningContent() | CallArguments():
                assert event.text
                if isinstance(event, CallArguments):
                    kind = f"{kind} {event.call}"
                if found and found[-1][0] == kind:
                    found[-1] = (kind, f"{found[-1][1]}{event.text}")
                else:
                    found.append((kind, event.text))
    return found


def check(events: Sequence[tuple[str, object]]) -> None:
    """The order of events, and that complete arguments are JSON objects."""
    open_call: int | None = None
    arguments = ""
    for kind, value in events:
        if kind == "CallStart":
            assert isinstance(value, tuple)
            open_call, arguments = value[0], ""
        elif kind.startswith("CallArguments"):
            assert kind == f"CallArguments {open_call}"
            arguments += str(value)
        elif kind == "CallEnd":
            assert value == open_call
            assert isinstance(json.loads(arguments), dict)
            open_call = None


def cut(text: str, places: Sequence[int]) -> list[str]:
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(at)]


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_cuts_change_nothing(name: str, data: st.DataObject) -> None:
    markers = markers_of(name)
    one = st.one_of(st.sampled_from(markers), st.sampled_from(PIECES), st.sampled_from(markers))
    text = "".join(data.draw(st.lists(one, max_size=24)))
    prompt_end = data.draw(st.sampled_from(["", *markers]))
    reason: FinishKind = data.draw(st.sampled_from(["stop", "length"]))
    places = data.draw(st.lists(st.integers(min_value=0), max_size=6))
    whole = read(parser_of(name, prompt_end=prompt_end), [text], reason)
    check(whole[0])
    assert read(parser_of(name, prompt_end=prompt_end), text, reason) == whole
    assert read(parser_of(name, prompt_end=prompt_end), cut(text, places), reason) == whole


def test_thoughts_in_pieces_leave_the_answer_at_the_beginning_of_a_line() -> None:
    text = "some thoughts of a few words</think>["
    whole = read(parser_of("llama4_pythonic", prompt_end="<think>"), [text], "length")
    pieces = read(parser_of("llama4_pythonic", prompt_end="<think>"), text, "length")
    assert pieces == whole == ([("ReasoningContent", "some thoughts of a few words")], "length")


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_what_is_no_call_is_text(name: str, data: st.DataObject) -> None:
    """Where no call was begun, everything but the format's own markers and space is text."""
    if FAMILIES[name].whole:
        return
    markers = [*FAMILIES[name].grammar.openers] or ["["]  # type: ignore[union-attr]
    pieces = st.one_of(st.sampled_from(markers), st.sampled_from(PIECES))
    text = "".join(data.draw(st.lists(pieces, max_size=16)))
    events, _ = read(parser_of(name), [text], "stop")
    if any(kind == "CallStart" for kind, _ in events):
        return
    said = "".join(str(value) for _, value in events)
    assert re.sub(r"\s", "", said) == re.sub(r"\s", "", text) or _only_closed(name, text)


def _only_closed(name: str, text: str) -> bool:
    """Whether the text holds a section without calls, which the format allows."""
    grammar = FAMILIES[name].grammar
    assert grammar is not None
    return any(closer in text for closer in grammar.closers) or "[]" in re.sub(r"\s", "", text)


def test_a_special_token_is_no_marker_where_other_tokens_write_it() -> None:
    parser = parser_of("kimi_k2", specials=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"))
    text = "<|tool_calls_section_begin|> is a marker"
    events = [*parser.feed(text), *parser.finish("stop")[0]]
    assert merged(events) == [("Content", text)]


def test_special_tokens_are_markers_where_they_are_tokens() -> None:
    names: tuple[str, ...] = (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
    )
    names += ("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|other|>")
    parser = parser_of("kimi_k2", specials=names)
    events: list[AnswerEvent] = []
    pieces = ("x", names[5], names[0], names[1], "functions.add:3", names[2], '{"text": "')
    for piece in (*pieces, names[3], '"}', names[3], names[4]):
        events += parser.feed(piece, [(0, len(piece))] if piece in names else ())
    last, reason = parser.finish("stop")
    assert reason == "tool_calls"
    assert merged([*events, *last]) == [
        ("Content", "x"),  # without a special token that means nothing here
        ("CallStart", (0, "add")),
        ("CallArguments 0", '{"text": "<|tool_call_end|>"}'),
        ("CallEnd", 0),
    ]
    (start,) = [event for event in events if isinstance(event, CallStart)]
    assert start.id == "functions.add:3"


def test_arguments_come_as_they_are_written() -> None:
    for name, text in {
        "hermes": '<tool_call>{"name": "add", "arguments": {"text": "one two three"}}</tool_call>',
        "qwen3_coder": "<function=add><parameter=text>one two three</parameter></function>",
        "gemma4": '<|tool_call>call:add{text:<|"|>one two three<|"|>}<tool_call|>',
        "llama4_pythonic": "[add(text='one two three')]",
        "minimax_m3": '<tool_call><invoke name="add"><text>one two three</text></invoke>'
        "</tool_call>".replace("<", "]<]minimax[>[<"),
    }.items():
        parser = parser_of(name)
        words = re.findall(r"\s*\S+", text)
        seen = [
            [event.text for event in parser.feed(word) if isinstance(event, CallArguments)]
            for word in words
        ]
        at = next(number for number, word in enumerate(words) if word == " two")
        assert seen[at] in ([" two"], ["two"], [" two "]), (name, seen)


def test_one_call_alone_where_calls_may_not_be_parallel() -> None:
    parser = parser_of("hermes", choice=ToolChoice(parallel=False))
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    events, reason = read(parser, [call, call], "stop")
    assert [kind for kind, _ in events] == ["CallStart", "CallArguments 0", "CallEnd"]
    assert reason == "tool_calls"


def test_calls_are_not_looked_for_when_none_is_allowed() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    events, reason = read(parser_of("hermes", choice=ToolChoice(mode="none")), [call], "stop")
    assert events == [("Content", call)]
    assert reason == "stop"


def test_ids_are_as_templates_want_them() -> None:
    for name, text, form in (
        ("mistral", "[TOOL_CALLS]now[ARGS]{}", r"[A-Za-z0-9]{9}"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', r"call_\w{24}"),
    ):
        (start, *_) = parser_of(name).feed(text)
        assert isinstance(start, CallStart)
        assert re.fullmatch(form, start.id)


def test_what_ends_the_thoughts_of_the_beginning_is_told() -> None:
    assert parser_of("hermes", prompt_end="<think>\n").thinks_until == "</think>"
    assert parser_of("hermes", prompt_end="assistant\n").thinks_until is None

"""Tools and messages that a principal sent before are not read again, and mean the same."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from commutator.errors import RequestError
from commutator_openai.chat import _structure_quickly, asked_chat, parse_body
from commutator_openai.known_parts import KnownParts, ReadTools
from commutator_openai.requests import ChatMessage, ChatRequest

TOOLS = [
    {
        "type": "function",
        "function": {"name": f"tool_{number}", "description": "d" * 99, "parameters": {"a": [1]}},
    }
    for number in range(9)
]
MESSAGES = [{"role": "user", "content": 'say "tools": []'}]
BODY = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 7, "x y": None}


@define
class Reader:
    """Notes what it is given, and what was ignored."""

    ignored: tuple[str, ...] = ()
    tools: list[bool] = field(factory=list)
    """Whether it was to read them."""
    messages: list[list[bool]] = field(factory=list)
    """The same of each message."""

    def __call__(self, data: dict[str, Any]) -> tuple[ChatRequest, tuple[str, ...]]:
        self.tools.append("tools" in data)
        self.messages.append([not isinstance(one, ChatMessage) for one in data["messages"]])
        read, ignored = _structure_quickly(ChatRequest, False, data)
        return read, ignored + self.ignored


def text_of(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def test_tools_and_messages_that_came_before_are_not_read_again() -> None:
    known, reader = KnownParts(), Reader()
    first, _ = known.read("one", reader, text_of(BODY))
    other = {**BODY, "messages": [*MESSAGES, {"role": "assistant", "content": "é"}]}
    second, _ = known.read("one", reader, text_of(other))
    assert reader.tools == [True, False]
    assert reader.messages == [[True], [False, True]]
    assert second == parse_body(ChatRequest, text_of(other))
    assert isinstance(second.tools, ReadTools)
    assert second.tools.tools is second.tools.tools
    assert [tool.name for tool in second.tools.tools] == [f"tool_{number}" for number in range(9)]
    assert first.tools == second.tools
    assert second.messages[0] is first.messages[0]
    assert asked_chat(second) == asked_chat(parse_body(ChatRequest, text_of(other)))
    known.read("two", reader, text_of(other))  # who never sent them
    assert (reader.tools[-1], reader.messages[-1]) == (True, [True, True])


@pytest.mark.parametrize(
    ("ignored", "tools", "messages"),
    [("tools.function.odd", True, False), ("messages.odd", False, True), ("odd", False, False)],
)
def test_only_what_was_read_without_a_loss_is_known(
    ignored: str, tools: bool, messages: bool
) -> None:
    known, reader = KnownParts(), Reader((ignored,))
    for _ in range(2):
        known.read("one", reader, text_of(BODY))
    assert (reader.tools, reader.messages) == ([True, tools], [[True], [messages]])


def test_those_used_longest_ago_leave() -> None:
    texts = [text_of({**BODY, "tools": TOOLS[: 5 + number]}) for number in range(3)]
    known, reader = KnownParts(most_bytes=17_000), Reader()
    for number in (0, 1, 0, 2, 0, 1):
        known.read("one", reader, texts[number])
    assert reader.tools == [True, True, False, True, False, True]


def test_messages_used_longest_ago_leave() -> None:
    known, reader = KnownParts(most_bytes=10_000), Reader()
    for number in range(12):
        said = [{"role": "user", "content": f"{number}" + "." * 600}]
        known.read("one", reader, text_of({"model": "m", "messages": said}))
        known.read("one", reader, text_of({"model": "m", "messages": said}))
    assert reader.messages == [[True], [False]] * 12
    said = [{"role": "user", "content": "0" + "." * 600}]
    known.read("one", reader, text_of({"model": "m", "messages": said}))
    assert reader.messages[-1] == [True]


@pytest.mark.parametrize(
    "text",
    [
        b"[1]",
        b'{"tools": [' + b"1," * 999,
        text_of(BODY)[:-1],
        text_of(BODY) + b"1",
        text_of(BODY).replace(b"say", b"\xff"),
    ],
)
def test_what_is_no_json_is_refused_as_ever(text: bytes) -> None:
    known, reader = KnownParts(), Reader()
    known.read("one", reader, text_of(BODY))
    with pytest.raises(RequestError) as refused:
        known.read("one", reader, text)
    assert refused.value.code == "invalid_json" or text == b"[1]"
    assert len(reader.tools) == 1


def test_two_tools_of_one_name_are_refused_each_time() -> None:
    known, reader = KnownParts(), Reader()
    for _ in range(2):
        read, _ = known.read("one", reader, text_of({**BODY, "tools": [*TOOLS, TOOLS[0]]}))
    assert isinstance(read.tools, ReadTools)
    for _ in range(2):
        with pytest.raises(RequestError, match="a name of its own"):
            assert read.tools.tools


def test_what_a_message_lacks_is_said_with_its_place_each_time() -> None:
    known, reader = KnownParts(), Reader()
    wrong = {"role": "tool", "content": "1"}
    for place in (1, 2):
        body = {**BODY, "messages": [*MESSAGES * place, wrong]}
        read, _ = known.read("one", reader, text_of(body))
        with pytest.raises(RequestError) as refused:
            asked_chat(read)
        assert refused.value.param == f"messages[{place}].tool_call_id"


_call = st.fixed_dictionaries(
    {"id": st.text(max_size=3), "function": st.fixed_dictionaries({"name": st.just("tool_1")})},
    optional={"type": st.sampled_from(["function", "odd"]), "index": st.none() | st.integers()},
)
_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "a b"])},
    optional={
        "content": st.none() | st.text(max_size=4) | st.just([{"type": "text", "text": "a"}]),
        "tool_calls": st.none() | st.lists(_call, max_size=2),
        "tool_call_id": st.just("1"),
        "odd": st.none() | st.integers(),
        "reasoning": st.none() | st.just("hm"),
    },
)
_bodies = st.lists(
    st.fixed_dictionaries(
        {"model": st.just("m"), "messages": st.lists(_message, max_size=4)},
        optional={
            "tools": st.sampled_from([TOOLS, TOOLS[:5], [], None, 7]),
            "padding": st.just("." * 600),
        },
    ),
    max_size=6,
)


def found_in(body: bytes, known: KnownParts | None) -> object:
    """What becomes of a body: what is asked and what is ignored, or the error."""
    structured = partial(_structure_quickly, ChatRequest, False)
    try:
        if known is None:
            read, ignored = structured(json.loads(body))
        else:
            read, ignored = known.read("one", structured, body)
        return asked_chat(read), ignored
    except RequestError as error:
        return str(error), error.param, error.code
    except Exception as error:
        return type(error)


@given(_bodies)
def test_whatever_came_before_a_body_means_what_it_means_by_itself(
    bodies: list[dict[str, Any]],
) -> None:
    known = KnownParts()
    for body in bodies:
        text = text_of(body)
        assert found_in(text, known) == found_in(text, None)

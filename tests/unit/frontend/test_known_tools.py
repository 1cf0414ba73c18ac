"""Tools that a principal sent before are not read again, and mean the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import define

from commutator.errors import RequestError
from commutator_openai.chat import parse_body
from commutator_openai.known_tools import KnownTools, ReadTools
from commutator_openai.requests import ChatRequest

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

    given: list[dict[str, Any]]
    ignored: tuple[str, ...] = ()

    def __call__(self, data: dict[str, Any]) -> tuple[ChatRequest, tuple[str, ...]]:
        self.given.append(data)
        return parse_body(ChatRequest, json.dumps(data).encode()), self.ignored


def test_tools_that_came_before_are_not_read_again() -> None:
    known, reader = KnownTools(), Reader([])
    text = json.dumps(BODY).encode()
    first, _ = known.read("one", reader, text)
    other = {**BODY, "messages": [*MESSAGES, {"role": "assistant", "content": "é"}]}
    second, _ = known.read("one", reader, json.dumps(other, ensure_ascii=False).encode())
    assert reader.given[0] == BODY
    assert reader.given[1] == {key: value for key, value in other.items() if key != "tools"}
    assert second == parse_body(ChatRequest, json.dumps(other).encode())
    assert isinstance(second.tools, ReadTools)
    assert second.tools.tools is second.tools.tools
    assert [tool.name for tool in second.tools.tools] == [f"tool_{number}" for number in range(9)]
    assert first.tools == second.tools
    known.read("two", reader, text)  # who never sent them
    assert reader.given[2] == BODY


def test_only_what_was_read_without_a_loss_is_known() -> None:
    known, reader = KnownTools(), Reader([], ("tools.0.function.odd",))
    for _ in range(2):
        known.read("one", reader, json.dumps(BODY).encode())
    assert reader.given == [BODY, BODY]


def test_those_used_longest_ago_leave() -> None:
    texts = [json.dumps({**BODY, "tools": TOOLS[: 5 + number]}).encode() for number in range(3)]
    known, reader = KnownTools(most_bytes=2_500), Reader([])
    for number in (0, 1, 0, 2, 0, 1):
        known.read("one", reader, texts[number])
    assert ["tools" in one for one in reader.given] == [True, True, False, True, False, True]


@pytest.mark.parametrize(
    "text",
    [
        b"[1]",
        b'{"tools": [' + b"1," * 999,
        json.dumps(BODY).encode()[:-1],
        json.dumps(BODY).encode() + b"1",
        json.dumps(BODY).encode().replace(b"say", b"\xff"),
    ],
)
def test_what_is_no_json_is_refused_as_ever(text: bytes) -> None:
    known, reader = KnownTools(), Reader([])
    known.read("one", reader, json.dumps(BODY).encode())
    with pytest.raises(RequestError) as refused:
        known.read("one", reader, text)
    assert refused.value.code == "invalid_json" or text == b"[1]"
    assert len(reader.given) == 1


def test_two_tools_of_one_name_are_refused_each_time() -> None:
    known, reader = KnownTools(), Reader([])
    for _ in range(2):
        body = json.dumps({**BODY, "tools": [*TOOLS, TOOLS[0]]}).encode()
        read, _ = known.read("one", reader, body)
    assert isinstance(read.tools, ReadTools)
    for _ in range(2):
        with pytest.raises(RequestError, match="a name of its own"):
            assert read.tools.tools

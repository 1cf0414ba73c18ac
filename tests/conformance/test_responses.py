"""The protocol `responses`, by the conformance suite and the types of OpenAI and Open Responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openresponses_types import ResponseResource
from pydantic import TypeAdapter
from tests.support.front_door import TEXT, FakeDispatcher, make_services

from commutator.contract.answer import (
    AnswerWriter,
    Batch,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Finish,
)
from commutator.contract.protocol import MountedProtocol
from commutator.contract.request import GenerateRequest, SamplingParams, TokenLogprob
from commutator.frontend import Plan
from commutator.frontend.request.generation import ChoiceRules
from commutator_responses.protocol import Responses, ResponsesConfig
from commutator_responses.reading import read_request
from commutator_responses.writer import ResponseWriter
from commutator_testing.protocols import RECORDED, USAGE, ProtocolContract, Said, mounted_on_a_door

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_REASONS = {"max_output_tokens": "length", "content_filter": "refusal"}
_LAST = ("response.completed", "response.incomplete", "response.failed")
TOOLS = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}},
    {"type": "custom", "name": "shell"},
    {
        "type": "namespace",
        "name": "files",
        "description": "Of files.",
        "tools": [{"type": "function", "name": "read"}],
    },
]


def make_writer(*, logprobs: bool = False, **fields: Any) -> ResponseWriter:
    request = GenerateRequest(request_id="r", token_ids=[1], sampling=SamplingParams())
    plan = Plan("m", TEXT, (request,), (None,), 1, ChoiceRules(), 1)
    item = {"type": "message", "role": "user", "content": "Hi"}
    asked = read_request(fields, [item], server_tools="leave_out")
    return ResponseWriter(
        "k", plan, asked.toolbox, {**asked.echo, "store": True}, logprobs=logprobs
    )


def events_of(sent: bytes) -> list[dict[str, Any]]:
    """Each checked: its name, its type, its number."""
    *blocks, done, rest = sent.decode().replace(": ping\n\n", "").split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        checked = EVENT.validate_python(event)
        assert type(checked).model_fields["type"].annotation is not str
        events.append(event)
    return events


class TestResponses(ProtocolContract):
    answers = 1

    @pytest.fixture
    def protocol(self) -> Responses:
        return Responses()

    @pytest.fixture
    def mounted(self, protocol: Responses) -> MountedProtocol:
        services = make_services(FakeDispatcher())
        return mounted_on_a_door(protocol, ResponsesConfig(kind="responses"), services)

    def writers(self, answers: int) -> Iterator[Callable[[], AnswerWriter]]:
        yield partial(make_writer)

    def read_stream(self, sent: bytes) -> tuple[Said, bool]:
        """What the pieces say; the whole object at the end says the same."""
        events = events_of(sent)
        assert [event["type"] for event in events[:2]] == [
            "response.created",
            "response.in_progress",
        ]
        items: list[dict[str, Any]] = []
        texts: dict[str, str] = {}
        for event in events:
            match event["type"]:
                case "response.output_item.added":
                    assert event["output_index"] == len(items)
                    assert event["item"]["status"] == "in_progress"
                    texts[event["item"]["id"]] = ""
                case "response.output_item.done":
                    assert event["output_index"] == len(items)
                    items.append(event["item"])
                case kind if kind.endswith(".delta"):
                    texts[event["item_id"]] += event["delta"]
        final = events[-1]
        assert final["type"] in _LAST
        complete = final["type"] != "response.failed"
        response = final["response"]
        assert response["output"] == items
        for item in items:
            assert texts[item["id"]] == _text(item)
        return [_read(response)], complete

    def read_whole(self, sent: bytes) -> Said:
        Response.model_validate_json(sent, strict=True)
        ResponseResource.model_validate_json(sent)
        return [_read(json.loads(sent))]


def _text(item: dict[str, Any]) -> str:
    match item["type"]:
        case "function_call":
            text: str = item["arguments"]
        case "custom_tool_call":
            text = item["input"]
        case _:
            text = item["content"][0]["text"]
    return text


def _read(response: dict[str, Any]) -> dict[str, object]:
    items = response["output"]
    calls = [(one["name"], one["arguments"]) for one in items if one["type"] == "function_call"]
    reason = (response["incomplete_details"] or {}).get("reason")
    return {
        "content": "".join(_text(one) for one in items if one["type"] == "message"),
        "reasoning": "".join(_text(one) for one in items if one["type"] == "reasoning"),
        "calls": calls,
        "finish": _REASONS.get(reason or "") or ("tool_calls" if calls else "stop"),
    }


def test_a_stream_ends_with_the_whole_answer() -> None:
    for recorded in RECORDED.values():
        if any(number for number, _ in recorded):
            continue
        streamed, kept = make_writer(), make_writer()
        final = events_of(streamed.stream(recorded) + streamed.stream_end(USAGE))[-1]["response"]
        kept.keep(recorded)
        whole = json.loads(b"".join(kept.whole(USAGE)))
        for one in (final, whole):
            one.update(created_at=0, completed_at=0)
        assert final == whole
        assert json.loads(kept.final)["id"] == json.loads(streamed.final)["id"] == "resp_k"


def test_what_is_cut_is_incomplete() -> None:
    writer = make_writer()
    writer.keep(RECORDED["cut"])
    found = json.loads(b"".join(writer.whole(USAGE)))
    assert found["status"] == found["output"][0]["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["completed_at"] is None
    assert found["usage"]["total_tokens"] == 46


def test_calls_have_the_names_that_the_client_gave() -> None:
    writer = make_writer(tools=TOOLS)
    recorded: Batch = [
        (0, CallStart(0, "a", "files__read")),
        (0, CallArguments(0, "{}")),
        (0, CallEnd(0)),
        (0, CallStart(1, "b", "shell")),
        (0, CallArguments(1, '{"input": "ls')),
        (0, CallArguments(1, ' \\"x\\""}')),
        (0, CallEnd(1)),
        (0, Finish("tool_calls")),
    ]
    events = events_of(writer.stream(recorded) + writer.stream_end(USAGE))
    read, shell = events[-1]["response"]["output"]
    assert (read["type"], read["namespace"], read["name"]) == ("function_call", "files", "read")
    assert (shell["type"], shell["name"]) == ("custom_tool_call", "shell")
    assert (shell["call_id"], shell["input"]) == ("b", 'ls "x"')
    done = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert [event["input"] for event in done] == ['ls "x"']


def test_log_probabilities_are_in_the_pieces_and_in_the_whole() -> None:
    writer = make_writer(logprobs=True, top_logprobs=1)
    entry = TokenLogprob(token_id=5, logprob=-0.5, top=((5, -0.5),))
    recorded: Batch = [(0, Content("a", ((0, entry),))), (0, Content("b")), (0, Finish("stop"))]
    events = events_of(writer.stream(recorded) + writer.stream_end(USAGE))
    deltas = [event["logprobs"] for event in events if event["type"].endswith("text.delta")]
    assert [len(one) for one in deltas] == [1, 0]
    part = events[-1]["response"]["output"][0]["content"][0]
    assert part["logprobs"] == deltas[0]
    assert deltas[0][0]["top_logprobs"][0]["logprob"] == -0.5

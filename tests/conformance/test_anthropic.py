"""The protocol `anthropic`, by the conformance suite."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from commutator.contract.answer import AnswerWriter
from commutator.contract.protocol import MountedProtocol
from commutator_anthropic.protocol import Anthropic, AnthropicConfig
from commutator_anthropic.writer import MessageWriter
from commutator_testing.protocols import ProtocolContract, Said, mounted_on_a_door

_REASONS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


class TestAnthropic(ProtocolContract):
    answers = 1

    @pytest.fixture
    def protocol(self) -> Anthropic:
        return Anthropic()

    @pytest.fixture
    def mounted(self, protocol: Anthropic) -> MountedProtocol:
        return mounted_on_a_door(protocol, AnthropicConfig(kind="anthropic"), None)

    def writers(self, answers: int) -> Iterator[Callable[[], AnswerWriter]]:
        yield partial(MessageWriter, "r", "m", 12)

    def can_say(self, writer: AnswerWriter, said: Said) -> Said:
        """Arguments are objects."""
        return [{**one, "calls": [_as_object(call) for call in one["calls"]]} for one in said]  # type: ignore[attr-defined]

    def read_stream(self, sent: bytes) -> tuple[Said, bool]:
        """As Anthropic's own client puts the events together."""
        message: Any = None
        bufs: dict[int, bytes] = {}
        complete = False
        for block in sent.decode().split("\n\n")[:-1]:
            if block.startswith(":"):
                continue
            name, data = block.split("\n", 1)
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            if event["type"] == "ping":
                assert message is not None
                continue
            if event["type"] == "error":
                break
            complete = event["type"] == "message_stop"
            message = accumulate_event(
                event=EVENT.validate_python(event), current_snapshot=message, json_bufs=bufs
            )
        return [_read(message.model_dump())], complete

    def read_whole(self, sent: bytes) -> Said:
        return [_read(json.loads(sent))]


def _as_object(call: tuple[str, Any]) -> tuple[str, Any]:
    name, given = call
    return name, json.loads(given or "{}") if isinstance(given, str) else given


def _read(message: dict[str, Any]) -> dict[str, object]:
    blocks = message["content"]
    return {
        "content": "".join(one["text"] for one in blocks if one["type"] == "text"),
        "reasoning": "".join(one["thinking"] for one in blocks if one["type"] == "thinking"),
        "calls": [(one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"],
        "finish": _REASONS.get(message["stop_reason"] or ""),
    }

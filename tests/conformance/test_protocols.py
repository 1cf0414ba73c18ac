"""The protocol `openai`, by the conformance suite; docs/plugins/ollama has that of Ollama's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.support.front_door import TEXT, FakeDispatcher, make_services

from commutator.contract.answer import AnswerWriter
from commutator.contract.protocol import MountedProtocol
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.frontend import Plan
from commutator.frontend.request.generation import ChoiceRules
from commutator_openai.protocol import OpenAi, OpenAiConfig
from commutator_openai.writers import ChatWriter, CompletionWriter, Shown
from commutator_testing.protocols import ProtocolContract, Said, mounted_on_a_door


def plan(answers: int) -> Plan:
    request = GenerateRequest(request_id="r", token_ids=[1], sampling=SamplingParams())
    return Plan("m", TEXT, (request,) * answers, (None,) * answers, 1, ChoiceRules(), answers)


class TestOpenAi(ProtocolContract):
    @pytest.fixture
    def protocol(self) -> OpenAi:
        return OpenAi()

    @pytest.fixture
    def mounted(self, protocol: OpenAi) -> MountedProtocol:
        services = make_services(FakeDispatcher())
        return mounted_on_a_door(protocol, OpenAiConfig(kind="openai"), services)

    def writers(self, answers: int) -> Iterator[Callable[[], AnswerWriter]]:
        for writer in (ChatWriter, CompletionWriter):
            yield partial(writer, "r", plan(answers), shown=Shown(include_usage=True))

    def can_say(self, writer: AnswerWriter, said: Said) -> Said:
        if isinstance(writer, CompletionWriter):  # text alone
            return [{**one, "reasoning": "", "calls": []} for one in said]
        return said

    def read_stream(self, sent: bytes) -> tuple[Said, bool]:
        events = [line.removeprefix("data: ") for line in _blocks(sent)]
        complete = events[-1] == "[DONE]"
        said: dict[int, dict[str, Any]] = {}
        for event in events[: len(events) - complete]:
            for choice in json.loads(event).get("choices", ()):
                self._add(said, choice)
        return [_plain(one) for _, one in sorted(said.items())], complete

    def _add(self, said: dict[int, dict[str, Any]], choice: dict[str, Any]) -> None:
        mine = said.setdefault(choice["index"], _nothing())
        delta = choice.get("delta", {"content": choice.get("text")})
        mine["content"] += delta.get("content") or ""
        mine["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            known = mine["calls"].setdefault(call["index"], ["", ""])
            known[0] += call["function"].get("name", "")
            known[1] += call["function"]["arguments"]
        mine["finish"] = choice["finish_reason"] or mine["finish"]

    def read_whole(self, sent: bytes) -> Said:
        said = []
        for choice in json.loads(sent)["choices"]:
            delta = choice.get("message", {"content": choice.get("text")})
            calls = [
                (call["function"]["name"], call["function"]["arguments"])
                for call in delta.get("tool_calls", ())
            ]
            said.append({
                "content": delta["content"] or "",
                "reasoning": delta.get("reasoning_content", ""),
                "calls": calls,
                "finish": choice["finish_reason"],
            })  # fmt: skip
        return said


def _blocks(sent: bytes) -> list[str]:
    """Server-sent events without comments."""
    return [one for one in sent.decode().split("\n\n") if one and not one.startswith(":")]


def _nothing() -> dict[str, Any]:
    return {"content": "", "reasoning": "", "calls": {}, "finish": None}


def _plain(said: dict[str, Any]) -> dict[str, object]:
    return {**said, "calls": [tuple(call) for call in said["calls"].values()]}

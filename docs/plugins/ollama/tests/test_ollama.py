"""Commutator's conformance suite for protocols."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from commutator.contract.answer import AnswerWriter
from commutator.contract.protocol import MountedProtocol, ProtocolConfig
from commutator_ollama import Ollama, Writer, message, response
from commutator_testing.protocols import ProtocolContract, Said, mounted_on_a_door


class TestOllama(ProtocolContract):
    answers = 1

    @pytest.fixture
    def protocol(self) -> Ollama:
        return Ollama()

    @pytest.fixture
    def mounted(self, protocol: Ollama) -> MountedProtocol:
        return mounted_on_a_door(protocol, ProtocolConfig(kind="ollama"), None)

    def writers(self, answers: int) -> Iterator[Callable[[], AnswerWriter]]:
        for text in (message, response):
            yield partial(Writer, text, SimpleNamespace(model="m"))

    def can_say(self, writer: AnswerWriter, said: Said) -> Said:
        """Arguments are objects, and an end with calls is called "stop"."""
        return [
            {
                **one,
                "calls": [(name, json.loads(text or "null")) for name, text in one["calls"]]  # type: ignore[attr-defined]
                if all(isinstance(text, str) for _, text in one["calls"])  # type: ignore[attr-defined]
                else one["calls"],
                "finish": "length" if one["finish"] == "length" else "stop",
            }
            for one in said
        ]

    def read_stream(self, sent: bytes) -> tuple[Said, bool]:
        said, complete = _nothing(), False
        for line in map(json.loads, sent.splitlines()):
            if "error" in line:
                return [_plain(said)], False
            self._add(said, line)
            complete = line["done"]
        return [_plain(said)], complete

    def read_whole(self, sent: bytes) -> Said:
        (line,) = map(json.loads, sent.splitlines())
        assert line["done"]
        said = _nothing()
        self._add(said, line)
        return [_plain(said)]

    def _add(self, said: dict[str, Any], line: dict[str, Any]) -> None:
        given = line.get("message", line)
        said["content"] += given.get("content", given.get("response", ""))
        said["reasoning"] += given.get("thinking", "")
        for call in given.get("tool_calls", ()):
            function = call["function"]
            said["calls"][len(said["calls"])] = (function["name"], function["arguments"])
        said["finish"] = line.get("done_reason", said["finish"])


def _nothing() -> dict[str, Any]:
    return {"content": "", "reasoning": "", "calls": {}, "finish": None}


def _plain(said: dict[str, Any]) -> dict[str, object]:
    return {**said, "calls": [tuple(call) for call in said["calls"].values()]}

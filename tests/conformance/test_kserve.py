"""The protocol `kserve`, by the conformance suite, in each form of its answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.support.kserve import ModelInferResponse, ModelStreamInferResponse, plain, values_of

from commutator.contract.answer import AnswerWriter
from commutator.contract.protocol import MountedProtocol
from commutator_kserve.inference import Inference
from commutator_kserve.protocol import Kserve, KserveConfig
from commutator_kserve.writers import GenerateWriter, JsonForm, StreamForm, TensorWriter
from commutator_testing.protocols import USAGE, ProtocolContract, Said, mounted_on_a_door


class TestGenerate(ProtocolContract):
    """Over REST, names and values side by side."""

    @pytest.fixture
    def protocol(self) -> Kserve:
        return Kserve()

    @pytest.fixture
    def mounted(self, protocol: Kserve) -> MountedProtocol:
        return mounted_on_a_door(protocol, KserveConfig(kind="kserve"), None)

    def writers(self, answers: int) -> Iterator[Callable[[], AnswerWriter]]:
        yield partial(GenerateWriter, Inference(model="m", id="7"), "m", answers, ())

    def read_stream(self, sent: bytes) -> tuple[Said, bool]:
        said: dict[int, dict[str, Any]] = {}
        for block in sent.decode().split("\n\n")[:-1]:
            if block.startswith(":"):
                continue
            data = json.loads(block.removeprefix("data: "))
            if "error" in data:
                return [], False
            assert data["id"] == "7"
            _add(said, data.get("index", 0), data)
        return _in_order(said), all(one["finish"] for one in said.values())

    def read_whole(self, sent: bytes) -> Said:
        data = json.loads(sent)
        count = len(data["text_output"]) if isinstance(data["text_output"], list) else 1
        said: dict[int, dict[str, Any]] = {}
        for number in range(count):
            row = {
                name: data[name][number] if count > 1 else data[name]
                for name in ("text_output", "finish_reason", "reasoning_output", "tool_calls")
                if name in data
            }
            _add(said, number, row)
        return _in_order(said)


class TestTensors(TestGenerate):
    """Over REST and gRPC as tensors. A message and what is added to it are one message."""

    def writers(self, answers: int) -> Iterator[Callable[[], AnswerWriter]]:
        yield lambda: TensorWriter(StreamForm(Inference(model="m", id="7"), "m"), answers)

    def _streamed(self, writer: AnswerWriter, recorded: Any, size: int) -> Said:
        sent = [writer.stream(recorded[at : at + size]) for at in range(0, len(recorded), size)]
        sent[-1] += writer.stream_end(USAGE)
        said: dict[int, dict[str, Any]] = {}
        finals = []
        for message in filter(None, sent):
            response = ModelStreamInferResponse.FromString(message).infer_response
            finals.append(plain(response.parameters)["triton_final_response"])
            values = values_of(response)
            _rows(said, values)
        assert finals == [False] * (len(finals) - 1) + [True]
        return self.can_say(writer, _in_order(said))

    def read_stream(self, sent: bytes) -> tuple[Said, bool]:
        response = ModelStreamInferResponse.FromString(sent)
        said: dict[int, dict[str, Any]] = {}
        return _in_order(said), not response.error_message

    def read_whole(self, sent: bytes) -> Said:
        said: dict[int, dict[str, Any]] = {}
        _rows(said, values_of(ModelStreamInferResponse.FromString(sent).infer_response))
        return _in_order(said)


class TestJson(TestTensors):
    """Whole answers over REST: the same tensors, as JSON and raw."""

    def writers(self, answers: int) -> Iterator[Callable[[], AnswerWriter]]:
        for binary in ({}, {"": True}, {"text_output": True}):
            inference = Inference(model="m", id="7", binary=binary)
            yield partial(_whole, inference, answers)

    def _streamed(self, writer: AnswerWriter, recorded: Any, size: int) -> Said:
        return self._whole(writer, recorded)

    def read_whole(self, sent: bytes) -> Said:
        length, _, sent = sent.partition(b"|")
        size = int(length) or len(sent)
        data, raw, at = json.loads(sent[:size]), sent[size:], 0
        made = ModelInferResponse()
        values: dict[str, Any] = {}
        for one in data["outputs"]:
            if "data" in one:
                values[one["name"]] = one["data"]
                continue
            end = at + one["parameters"]["binary_data_size"]
            del made.outputs[:], made.raw_output_contents[:]
            made.outputs.add(name=one["name"], datatype=one["datatype"])
            made.raw_output_contents.append(raw[at:end])
            values |= values_of(made)
            at = end
        assert at == len(raw)
        said: dict[int, dict[str, Any]] = {}
        _rows(said, values)
        return _in_order(said)

    def test_a_failure_in_the_middle_ends_a_stream(self) -> None:
        """It has no streams: `generate_stream` has."""


class _Whole(TensorWriter):
    """Puts the header before the body."""

    def whole(self, usage: Any) -> Iterator[bytes]:
        parts = [*super().whole(usage)]
        length = self._headers.get("Inference-Header-Content-Length", "0")
        yield f"{length}|".encode() + b"".join(parts)


def _whole(inference: Inference, answers: int) -> AnswerWriter:
    return _Whole(JsonForm(inference, "m"), answers)


def _rows(said: dict[int, dict[str, Any]], values: dict[str, Any]) -> None:
    for place, number in enumerate(values.get("index", [0])):
        row = {name: one[place] for name, one in values.items()}
        if "tool_calls" in row:
            row["tool_calls"] = json.loads(row["tool_calls"] or "[]")
        _add(said, number, row)


def _add(said: dict[int, dict[str, Any]], number: int, row: dict[str, Any]) -> None:
    empty: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": ""}
    one = said.setdefault(number, empty)
    one["content"] += row.get("text_output", "")
    one["reasoning"] += row.get("reasoning_output", "")
    one["calls"] += [(call["name"], call["arguments"]) for call in row.get("tool_calls") or ()]
    one["finish"] = row.get("finish_reason", "") or one["finish"]


def _in_order(said: dict[int, dict[str, Any]]) -> Said:
    return [said[number] for number in sorted(said)]

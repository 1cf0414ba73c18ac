"""Writes answers as tensors: `text_output` and `finish_reason`, and what else an answer has.

Whole or in pieces, an answer is the same tensors. In a stream each message has what came since the
last one, and the last says so (`triton_final_response`).
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from attrs import define, field

from commutator.contract.answer import (
    AnswerEvent,
    AnswerWriter,
    Batch,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Failure,
    Finish,
    ReasoningContent,
    Usage,
)
from commutator.errors import RequestError
from commutator_kserve.asking import VERSION
from commutator_kserve.inference import Inference
from commutator_kserve.messages import message
from commutator_kserve.tensors import Tensor, raw_of

JSON = "application/json; charset=utf-8"
OCTETS = "application/octet-stream"
HEADER_LENGTH = "Inference-Header-Content-Length"
_OUTPUTS = ("text_output", "finish_reason", "reasoning_output", "tool_calls")
_USUAL = _OUTPUTS[:2]
_FINISHES = {"refusal": "content_filter"}
_FINAL = "triton_final_response"
_encode = msgspec.json.encode
_ModelInferResponse = message("ModelInferResponse")
_ModelStreamInferResponse = message("ModelStreamInferResponse")


def error_body(failure: Failure) -> bytes:
    """The shape of every error over REST."""
    return _encode({"error": failure.message})


class Form(ABC):
    """How one answer, or a piece of one, is written."""

    content_type = JSON
    in_stream = False
    """Whether an answer stands among others: its parameters say that it is the last, and have its
    headers."""

    def __init__(self, inference: Inference, model: str) -> None:
        self.inference = inference
        self.model = model
        self.headers: dict[str, str] = {}
        """Of the answer, once it is written."""

    @abstractmethod
    def written(self, outputs: Sequence[Tensor], parameters: Mapping[str, Any]) -> bytes:
        """The bytes of an answer with ``outputs``."""

    def parameters(
        self, counts: Mapping[str, int], headers: Mapping[str, str], *, final: bool
    ) -> dict[str, Any]:
        """Those of an answer; in a stream ``headers`` are among them. ``final``: it is the last."""
        said: dict[str, Any] = dict(counts)
        if final:
            said[_FINAL] = True
        if self.in_stream:
            said |= {name.lower(): value for name, value in headers.items()}
        return said

    def failed(self, failure: Failure) -> bytes:
        """What ends an answer in pieces that fails."""
        return error_body(failure)


class MessageForm(Form):
    """A ``ModelInferResponse``. Outputs are always raw: clients read them without a copy."""

    def written(self, outputs: Sequence[Tensor], parameters: Mapping[str, Any]) -> bytes:
        data: bytes = self.response(outputs, parameters).SerializeToString()
        return data

    def response(self, outputs: Sequence[Tensor], parameters: Mapping[str, Any]) -> Any:
        """The message."""
        made = _ModelInferResponse(
            model_name=self.model, model_version=VERSION, id=self.inference.id
        )
        for one in outputs:
            made.outputs.add(name=one.name, datatype=one.datatype, shape=one.shape)
            made.raw_output_contents.append(raw_of(one))
        for name, value in parameters.items():
            _set(made.parameters[name], value)
        return made


class StreamForm(MessageForm):
    """A ``ModelStreamInferResponse``."""

    in_stream = True

    def written(self, outputs: Sequence[Tensor], parameters: Mapping[str, Any]) -> bytes:
        inner = self.response(outputs, parameters)
        data: bytes = _ModelStreamInferResponse(infer_response=inner).SerializeToString()
        return data

    def failed(self, failure: Failure) -> bytes:
        """Also the id of the request, for clients that show no more than the text."""
        parameters: dict[str, Any] = {_FINAL: True, "error_code": failure.code or "error"}
        if "Retry-After" in failure.headers:
            parameters["retry_after_s"] = failure.headers["Retry-After"]
        text = failure.message
        if self.inference.id:
            text = f"[request id: {self.inference.id}] {text}"
        said = _ModelStreamInferResponse(
            error_message=text, infer_response=self.response((), parameters)
        )
        data: bytes = said.SerializeToString()
        return data


class JsonForm(Form):
    """REST: JSON, and after it those outputs that are wanted raw."""

    def written(self, outputs: Sequence[Tensor], parameters: Mapping[str, Any]) -> bytes:
        binary, usual = self.inference.binary, self.inference.binary.get("", False)
        raw, shown = list[bytes](), list[dict[str, Any]]()
        for one in outputs:
            said: dict[str, Any] = {
                "name": one.name,
                "datatype": one.datatype,
                "shape": list(one.shape),
            }
            if binary.get(one.name, usual):
                raw.append(raw_of(one))
                said["parameters"] = {"binary_data_size": len(raw[-1])}
            else:
                said["data"] = _json_values(one)
            shown.append(said)
        body: dict[str, Any] = {"model_name": self.model, "model_version": VERSION}
        if self.inference.id:
            body["id"] = self.inference.id
        if parameters:
            body["parameters"] = dict(parameters)
        encoded = _encode(body | {"outputs": shown})
        if raw:
            self.headers[HEADER_LENGTH] = str(len(encoded))
            self.content_type = OCTETS
        return b"".join([encoded, *raw])


@define
class _Row:
    """What one answer has since it was last written."""

    text: list[str] = field(factory=list)
    thoughts: list[str] = field(factory=list)
    calls: list[dict[str, Any]] = field(factory=list)
    finish: str = ""


class _Rows(AnswerWriter):
    """Collects events by answer."""

    def __init__(self, answers: int, echoes: Sequence[str] = ()) -> None:
        """``echoes``: for each answer the text that it begins with."""
        self._rows: dict[int, _Row] = {}
        self._answers = answers
        self._open: dict[tuple[int, int], dict[str, Any]] = {}
        """Calls that are not complete, by answer and number."""
        self._kept_bytes = 0
        self._echoes = dict(enumerate(echoes))

    def _add(self, batch: Batch) -> None:
        for answer, event in batch:
            row = self._rows.get(answer)
            if row is None:
                row = self._rows[answer] = _Row()
            if self._echoes and (echo := self._echoes.pop(answer, None)):
                row.text.append(echo)
                self._kept_bytes += len(echo)
            self._add_event(row, answer, event)

    def _add_event(self, row: _Row, answer: int, event: AnswerEvent) -> None:
        match event:
            case Content(text=text):
                row.text.append(text)
                self._kept_bytes += len(text)
            case Finish(reason=reason):
                row.finish = _FINISHES.get(reason, reason)
            case ReasoningContent(text=text):
                row.thoughts.append(text)
                self._kept_bytes += len(text)
            case CallStart(call=number, id=call_id, name=name):
                self._open[answer, number] = {"id": call_id, "name": name, "arguments": ""}
            case CallArguments(call=number, text=text):
                self._open[answer, number]["arguments"] += text
                self._kept_bytes += len(text)
            case CallEnd(call=number):
                row.calls.append(self._open.pop((answer, number)))

    def keep(self, batch: Batch) -> None:
        self._add(batch)

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    def _taken(self) -> dict[int, _Row]:
        rows, self._rows = self._rows, {}
        return dict(sorted(rows.items()))


class TensorWriter(_Rows):
    """Answers as tensors, in one of the forms. Each row is an answer."""

    stream_type = OCTETS

    def __init__(
        self,
        form: Form,
        answers: int,
        echoes: Sequence[str] = (),
        headers: dict[str, str] | None = None,
    ) -> None:
        """``headers`` are those of the answer, which may grow until it is written.

        Raises RequestError for outputs that there are not.
        """
        super().__init__(answers, echoes)
        self._form = form
        self._headers = {} if headers is None else headers
        self._wanted = form.inference.outputs
        for name in self._wanted or ():
            if name not in _OUTPUTS:
                raise RequestError(
                    f"outputs: unknown output {name[:100]!r}; expected some of "
                    f"{', '.join(_OUTPUTS)}",
                    "outputs",
                )

    def stream(self, batch: Batch) -> bytes:
        self._add(batch)
        rows = self._taken()
        if not any(row.text or row.thoughts or row.calls or row.finish for row in rows.values()):
            return b""  # part of a call, which is sent once it is complete
        return self._form.written(self._outputs(rows), {_FINAL: False})

    def stream_end(self, usage: Usage) -> bytes:
        # Messages that follow one another are one, says the encoding: this adds to the last piece.
        return self._form.written((), self._parameters(usage, final=True))

    def stream_failed(self, failure: Failure) -> bytes:
        return self._form.failed(failure)

    def whole(self, usage: Usage) -> Iterator[bytes]:
        rows = {number: self._rows.get(number, _Row()) for number in range(self._answers)}
        said = self._parameters(usage, final=self._form.in_stream)
        yield self._form.written(self._outputs(rows), said)
        self.whole_type = self._form.content_type
        self._headers.update(self._form.headers)

    def _parameters(self, usage: Usage, *, final: bool) -> dict[str, Any]:
        return self._form.parameters(_counts(usage), self._headers, final=final)

    def _outputs(self, rows: Mapping[int, _Row]) -> list[Tensor]:
        found, shape, wanted = list[Tensor](), (len(rows),), self._wanted
        values = _columns(rows.values())
        values["tool_calls"] = [
            _encode(calls).decode() if calls else "" for calls in values["tool_calls"]
        ]
        for name in wanted or _OUTPUTS:
            texts = values[name]
            if wanted or name in _USUAL or any(texts):
                found.append(Tensor(name, "BYTES", shape, [one.encode() for one in texts]))
        if self._answers > 1:
            found.append(Tensor("index", "INT32", shape, list(rows)))
        return found


class GenerateWriter(_Rows):
    """Answers of /generate and /generate_stream: names and values side by side."""

    ping = b": ping\n\n"

    def __init__(
        self, inference: Inference, model: str, answers: int, echoes: Sequence[str]
    ) -> None:
        super().__init__(answers, echoes)
        self._inference = inference
        self._model = model

    def stream(self, batch: Batch) -> bytes:
        self._add(batch)
        return b"".join(
            b"data: %s\n\n" % _encode(self._said([row], number))
            for number, row in self._taken().items()
            if row.text or row.thoughts or row.calls or row.finish
        )

    def stream_end(self, usage: Usage) -> bytes:
        return b""

    def stream_failed(self, failure: Failure) -> bytes:
        return b"data: %s\n\n" % error_body(failure)

    def whole(self, usage: Usage) -> Iterator[bytes]:
        rows = [self._rows.get(number, _Row()) for number in range(self._answers)]
        yield _encode(self._said(rows, None) | {"usage": _counts(usage)})

    def _said(self, rows: Sequence[_Row], number: int | None) -> dict[str, Any]:
        said: dict[str, Any] = {"model_name": self._model, "model_version": VERSION}
        if self._inference.id:
            said["id"] = self._inference.id
        if number is not None and self._answers > 1:
            said["index"] = number
        for name, found in _columns(rows).items():
            if name in _USUAL or any(found):
                said[name] = found[0] if len(found) == 1 else found
        return said


def _columns(rows: Collection[_Row]) -> dict[str, list[Any]]:
    """The values of each output, in the order of ``_OUTPUTS``."""
    return {
        "text_output": ["".join(row.text) for row in rows],
        "finish_reason": [row.finish for row in rows],
        "reasoning_output": ["".join(row.thoughts) for row in rows],
        "tool_calls": [row.calls for row in rows],
    }


def _counts(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def embedding_outputs(inference: Inference, rows: Sequence[bytes]) -> list[Tensor]:
    """The vectors as one tensor. Raises RequestError for outputs that there are not."""
    for name in inference.outputs or ():
        if name != "embedding":
            raise RequestError(
                f"outputs: unknown output {name[:100]!r}; expected embedding", "outputs"
            )
    size = len(rows[0]) // 4
    return [Tensor("embedding", "FP32", (len(rows), size), rows)]


def _json_values(tensor: Tensor) -> list[Any]:
    if tensor.datatype == "BYTES":
        return [one.decode() for one in tensor.values]
    if tensor.datatype == "FP32":
        return [
            number for row in tensor.values for number in struct.unpack(f"<{len(row) // 4}f", row)
        ]
    return list(tensor.values)


def _set(parameter: Any, value: Any) -> None:
    match value:
        case bool():
            parameter.bool_param = value
        case int():
            parameter.int64_param = value
        case _:
            parameter.string_param = str(value)

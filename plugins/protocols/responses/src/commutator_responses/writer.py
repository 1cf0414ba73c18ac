"""Writes answers as the Responses API has them: items, as events of a stream or as one object."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
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
from commutator.contract.conversation import Generate
from commutator.contract.request import SamplingParams, TokenLogprob
from commutator.frontend import Plan
from commutator_responses.tools import Toolbox, custom_input

_encode = msgspec.json.Encoder().encode

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""
_TOO_MANY = 429
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_INCOMPLETE = {"length": "max_output_tokens", "refusal": "content_filter"}
"""Why a response is incomplete, by the reason of its end."""
DONE = b"data: [DONE]\n\n"
"""Ends a stream over HTTP."""


def error_body(failure: Failure) -> dict[str, Any]:
    """The shape of every error."""
    status = failure.status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")  # noqa: PLR2004 - HTTP's servers
    said = {"message": failure.message, "type": kind}
    return {"error": {**said, "param": failure.param, "code": failure.code}}


def line_error(failure: Failure) -> bytes:
    """What says over a WebSocket that a message cannot be answered."""
    said = {"type": "error", "status": failure.status, "headers": failure.headers}
    return _encode({**said, **error_body(failure)}) + b"\n"


def line_responses(response: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The lines of a response without output that is complete at once, and its JSON."""
    usage = usage_of(Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0))
    over = {"status": "completed", "completed_at": response["created_at"], "usage": usage}
    final = {**response, **over}
    said = {"response.created": response, "response.completed": final}
    lines = [
        _encode({"type": kind, "response": one, "sequence_number": number})
        for number, (kind, one) in enumerate(said.items())
    ]
    return b"\n".join(lines), _encode(final)


def new_response(
    key: str, model: str, echo: Mapping[str, Any], sampling: Generate | SamplingParams
) -> dict[str, Any]:
    """A response of which nothing is made yet. ``echo`` repeats the request."""
    return {
        "id": f"resp_{key}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        **echo,
        "usage": None,
    }


def failed_response(response: Mapping[str, Any], failure: Failure) -> dict[str, Any]:
    """``response`` with its end, which takes the place of any other."""
    code = "rate_limit_exceeded" if failure.status == _TOO_MANY else "server_error"
    said = {"code": code, "message": failure.message}
    over = {"status": "failed", "error": said, "completed_at": None, "incomplete_details": None}
    return {**response, **over}


@define
class _Open:
    """The item whose pieces come now."""

    item: dict[str, Any]
    pieces: list[str] = field(factory=list)
    logprobs: list[msgspec.Raw] = field(factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ResponseWriter(AnswerWriter):
    """Streams events item by item, or keeps the items for one object.

    Over HTTP they are server-sent events, over a WebSocket a line of JSON each.
    """

    final = b""
    """The JSON of the whole response, once it is complete, or has failed while it was streamed."""

    def __init__(
        self,
        key: str,
        plan: Plan,
        toolbox: Toolbox,
        echo: Mapping[str, Any],
        *,
        logprobs: bool,
        in_lines: bool = False,
    ) -> None:
        """``key`` makes ids; ``echo`` are the fields of the response that repeat the request."""
        self._head, self._tail = (b"", b"\n") if in_lines else (b"event: %b\ndata: ", b"\n\n")
        self._done = b"" if in_lines else DONE
        self.ping = b"" if in_lines else b": ping\n\n"
        self._key = key
        self._toolbox = toolbox
        self._token_text = plan.text.token_text
        self._token_bytes = plan.text.token_bytes
        self._logprobs = logprobs
        self._plan = plan
        self._token_ids: list[int] | None = [] if plan.rules.token_ids else None
        """Those of the answer, where the client wants them."""
        self._response = new_response(key, plan.name, echo, plan.requests[0].sampling)
        self._output: list[dict[str, Any]] = self._response["output"]
        self._open: _Open | None = None
        self._text_delta = b""
        """How an event about more text of the message that is open begins."""
        self._kept_bytes = 0
        self._sequence = 0
        self._begun = False
        self._unended: int | None = None
        """The number of the last event, if there is one."""
        self._reason = "stop"

    # ------------------------------------------------------------------- streamed

    def stream(self, batch: Batch) -> bytes:
        sent = [] if self._begun else [self._begin()]
        for _, event in batch:
            if self._token_ids is not None and type(event) is Content:
                self._token_ids += event.token_ids
            if type(event) is Content and event.text and self._text_delta and not event.logprobs:
                sent.append(self._more_text(event.text))
            else:
                sent += map(self._event, self._said(event))
        return b"".join(sent)

    def _more_text(self, text: str) -> bytes:
        """The event of most tokens, at a fifth of the cost of ``_event``."""
        self._keep(text)
        number = self._sequence
        self._sequence += 1
        said = b'%b%b,"sequence_number":%d}' % (self._text_delta, _encode(text), number)
        return said + self._tail

    def _begin(self) -> bytes:
        self._begun = True
        return b"".join(
            self._event({"type": f"response.{kind}", "response": self._response})
            for kind in ("created", "in_progress")
        )

    def stream_end(self, usage: Usage) -> bytes:
        begin = b"" if self._begun else self._begin()
        self._unended = self._sequence
        self._complete(usage)
        status = self._response["status"]
        response = msgspec.Raw(self.final)
        return (
            begin + self._event({"type": f"response.{status}", "response": response}) + self._done
        )

    def stream_failed(self, failure: Failure) -> bytes:
        if self._unended is not None:  # it was complete, and could not be kept: nobody saw its end
            self._sequence = self._unended
        begin = b"" if self._begun else self._begin()
        response = failed_response(self._response, failure)
        self.final = _encode(response)
        return begin + self._event({"type": "response.failed", "response": response}) + self._done

    def _event(self, said: dict[str, Any]) -> bytes:
        kind: str = said["type"]
        data = _encode({**said, "sequence_number": self._sequence})
        self._sequence += 1
        return self._headed(kind) + data + self._tail

    def _headed(self, kind: str) -> bytes:
        """How an event begins."""
        return self._head % kind.encode() if self._head else b""

    # ---------------------------------------------------------------------- whole

    def keep(self, batch: Batch) -> None:
        for _, event in batch:
            if self._token_ids is not None and type(event) is Content:
                self._token_ids += event.token_ids
            for _ in self._said(event):
                pass

    def so_far(self) -> bytes:
        """The JSON of the response as it is now, with the items that are complete."""
        return _encode(self._response)

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    def whole(self, usage: Usage) -> Iterator[bytes]:
        self._complete(usage)
        yield self.final

    def _complete(self, usage: Usage) -> None:
        response, reason = self._response, _INCOMPLETE.get(self._reason)
        response["status"] = "completed" if reason is None else "incomplete"
        if reason is None:
            response["completed_at"] = int(time.time())
        else:
            response["incomplete_details"] = {"reason": reason}
        response["usage"] = usage_of(usage)
        if self._token_ids is not None:  # as vLLM tells them
            response["input_messages"] = [self._raw(self._plan.requests[0].token_ids)]
            response["output_messages"] = [self._raw(self._token_ids)]
        self.final = _encode(response)

    def _raw(self, token_ids: Sequence[int]) -> dict[str, Any]:
        text = self._plan.text.decode(token_ids, skip_special_tokens=False)
        return {"type": "raw_message_tokens", "message": text, "tokens": [*token_ids]}

    # ---------------------------------------------------------------------- items

    def _said(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """What is said of ``event``, in the stream's order, without numbers of sequence."""
        match event:
            case Content(text=text, logprobs=logprobs):
                if text or (logprobs and self._logprobs):
                    yield from self._text(text, logprobs)
            case ReasoningContent(text=text):
                yield from self._opened("reasoning")
                yield self._delta("reasoning_text", text, content_index=0)
            case CallStart(id=call_id, name=name):
                yield from self._close()
                yield from self._called(call_id, name)
            case CallArguments(text=text):
                if self._open is not None and self._open.item["type"] == "custom_tool_call":
                    self._keep(text)  # the client gets the text that is inside, once it is whole
                else:
                    yield self._delta("function_call_arguments", text)
            case CallEnd():
                yield from self._close()
            case Finish(reason=reason):
                self._reason = reason
                yield from self._close("incomplete" if reason in _INCOMPLETE else "completed")

    def _text(
        self, text: str, logprobs: tuple[tuple[int, TokenLogprob], ...]
    ) -> Iterator[dict[str, Any]]:
        yield from self._opened("message")
        entries = []
        if self._logprobs:
            entries = [msgspec.Raw(_encode(self._entry(entry))) for _, entry in logprobs]
        assert self._open is not None
        self._open.logprobs += entries
        self._kept_bytes += sum(map(len, entries))
        yield self._delta("output_text", text, content_index=0, logprobs=entries)

    def _opened(self, kind: str) -> Iterator[dict[str, Any]]:
        """The beginning of a message or of reasoning, unless it has begun."""
        if self._open is not None and self._open.item["type"] == kind:
            return
        yield from self._close()
        if kind == "message":
            item: dict[str, Any] = {"id": self._id("msg"), "type": "message", "role": "assistant"}
            item = {**item, "status": "in_progress", "content": []}
        else:
            item = {"id": self._id("rs"), "type": "reasoning", "status": "in_progress"}
            item = {**item, "summary": [], "content": [], "encrypted_content": None}
        self._open = _Open(item)
        yield self._of_item("output_item.added", item=item)
        yield self._of_part("content_part.added", part=_part(kind, "", ()))
        if kind == "message":
            said = self._of_part("output_text.delta", logprobs=(), delta="")
            self._text_delta = self._headed(said["type"]) + _encode(said)[:-3]

    def _called(self, call_id: str, name: str) -> Iterator[dict[str, Any]]:
        named = self._toolbox.named(name)
        kind = "custom_tool_call" if named.is_custom else "function_call"
        item = {
            "id": self._id("ctc" if named.is_custom else "fc"),
            "type": kind,
            "status": "in_progress",
            "call_id": call_id,
            "name": named.name,
            "input" if named.is_custom else "arguments": "",
        }
        if named.namespace is not None:
            item["namespace"] = named.namespace
        self._open = _Open(item)
        yield self._of_item("output_item.added", item=item)

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """The end of the item that is open."""
        if self._open is None:
            return
        item, text = self._open.item, self._open.text
        match item["type"]:
            case "message" | "reasoning" as kind:
                part = _part(kind, text, self._open.logprobs)
                done = {name: part[name] for name in ("text", "logprobs") if name in part}
                yield self._of_part(f"{part['type']}.done", **done)
                yield self._of_part("content_part.done", part=part)
                item["content"] = [part]
            case "custom_tool_call":
                item["input"] = custom_input(text)
                name = "custom_tool_call_input"
                yield self._of_item(f"{name}.delta", delta=item["input"])
                yield self._of_item(f"{name}.done", input=item["input"])
            case _:
                item["arguments"] = text
                yield self._of_item(
                    "function_call_arguments.done", name=item["name"], arguments=text
                )
        item["status"] = status
        yield self._of_item("output_item.done", item=item)
        self._output.append(item)
        self._open, self._text_delta = None, b""

    def _delta(self, name: str, text: str, **more: Any) -> dict[str, Any]:
        self._keep(text)
        return self._of_item(f"{name}.delta", delta=text, **more)

    def _keep(self, text: str) -> None:
        assert self._open is not None
        self._open.pieces.append(text)
        self._kept_bytes += len(text)

    def _of_part(self, event: str, **more: Any) -> dict[str, Any]:
        return self._of_item(event, content_index=0, **more)

    def _of_item(self, event: str, **more: Any) -> dict[str, Any]:
        """An event about the item that is open."""
        assert self._open is not None
        said: dict[str, Any] = {"type": f"response.{event}", "output_index": len(self._output)}
        if "item" not in more:
            said["item_id"] = self._open.item["id"]
        return {**said, **more}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._key}_{len(self._output)}"

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_text(token_id),
            "bytes": [*self._token_bytes(token_id)],
            "logprob": max(logprob, MIN_LOGPROB),
        }


def _part(kind: str, text: str, logprobs: Any) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def usage_of(usage: Usage) -> dict[str, Any]:
    """As the API counts tokens."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

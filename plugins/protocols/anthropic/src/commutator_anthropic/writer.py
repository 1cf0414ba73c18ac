"""Writes answers as the Messages API has them: one message of content blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

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

SIGNATURE = "bm90IHNpZ25lZA=="
"""Clients want thoughts signed, and give the signature back; nobody checks it here."""

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "refusal": "refusal",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_encode = msgspec.json.encode


def error_body(failure: Failure) -> dict[str, Any]:
    """The shape of every error."""
    status = failure.status
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")  # noqa: PLR2004 - HTTP's servers
    return {"type": "error", "error": {"type": kind, "message": failure.message}}


class MessageWriter(AnswerWriter):
    """Streams events block by block, or keeps the blocks for one message."""

    ping = b": ping\n\n"  # a comment, as the first event is message_start

    def __init__(
        self,
        request_id: str,
        model: str,
        prompt_tokens: int,
        *,
        fills_context: bool = False,
        marked_tokens: int = 0,
    ) -> None:
        """``fills_context``: the longest answer is what is left of the model's context.

        ``marked_tokens``: the beginning of the prompt that its client wants cached, and that is.
        """
        self._id = f"msg_{request_id}"
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._fills_context = fills_context
        self._marked_tokens = marked_tokens
        self._blocks = 0
        self._open: dict[str, Any] | None = None
        """The block whose pieces come now, as it will be in a whole answer."""
        self._kept: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        self._kept_bytes = 0
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._begun = False

    def stream(self, batch: Batch) -> bytes:
        sent = b"" if self._begun else self._start()
        return sent + b"".join(_event(said) for _, event in batch for said in self._said(event))

    def stream_end(self, usage: Usage) -> bytes:
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return (
            (b"" if self._begun else self._start())
            + _event({"type": "message_delta", "delta": delta, "usage": self._usage(usage)})
            + _event({"type": "message_stop"})
        )

    def stream_failed(self, failure: Failure) -> bytes:
        return _event(error_body(failure))

    def keep(self, batch: Batch) -> None:
        for _, event in batch:
            for _ in self._said(event):
                pass

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    def whole(self, usage: Usage) -> Iterator[bytes]:
        yield _encode(self._message(self._kept, self._usage(usage)))

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": usage,
        }

    def _start(self) -> bytes:
        self._begun = True
        self.ping = _event({"type": "ping"})
        message = self._message([], _counts(self._prompt_tokens))
        return _event({"type": "message_start", "message": message})

    def _usage(self, usage: Usage) -> dict[str, int]:
        found = usage.cached_tokens
        created = max(0, self._marked_tokens - found)
        new = usage.prompt_tokens - found - created
        return _counts(new, created=created, found=found, output=usage.completion_tokens)

    def _said(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        match event:
            case Content(text=text):
                if text:
                    yield from self._piece({"type": "text", "text": ""}, "text_delta", "text", text)
            case ReasoningContent(text=text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._piece(block, "thinking_delta", "thinking", text)
            case CallStart(id=call_id, name=name):
                yield from self._close()
                yield self._opened({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(text=text):
                yield self._delta("input_json_delta", "partial_json", text)
            case CallEnd():
                yield from self._close(complete=True)
            case Finish(reason=reason, stop=stop):
                yield from self._close()
                self._stop_reason = _STOP_REASONS[reason]
                if reason == "length" and self._fills_context:
                    self._stop_reason = "model_context_window_exceeded"
                if reason == "stop" and isinstance(stop, str):
                    self._stop_reason, self._stop_sequence = "stop_sequence", stop

    def _piece(
        self, block: dict[str, Any], delta: str, name: str, text: str
    ) -> Iterator[dict[str, Any]]:
        if self._open is None or self._open["type"] != block["type"]:
            yield from self._close()
            yield self._opened(block)
        yield self._delta(delta, name, text)

    def _opened(self, block: dict[str, Any]) -> dict[str, Any]:
        self._open = block
        return {"type": "content_block_start", "index": self._blocks, "content_block": block}

    def _delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
        self._pieces.append(text)
        self._kept_bytes += len(text)
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _close(self, *, complete: bool = False) -> Iterator[dict[str, Any]]:
        """``complete``: of a call; one that is not is left out of the whole message."""
        if self._open is None:
            return
        block, text = self._open, "".join(self._pieces)
        match block["type"]:
            case "tool_use":
                block["input"] = _object(text)
            case "thinking":
                block["thinking"], block["signature"] = text, SIGNATURE
                delta = {"type": "signature_delta", "signature": SIGNATURE}
                yield {"type": "content_block_delta", "index": self._blocks, "delta": delta}
            case _:
                block["text"] = text
        if complete or block["type"] != "tool_use":
            self._kept.append(block)
        self._open, self._pieces = None, []
        yield {"type": "content_block_stop", "index": self._blocks}
        self._blocks += 1


def _object(text: str) -> dict[str, Any]:
    """A call's arguments as the API has them; what is no object stays as the model wrote it."""
    try:
        found = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {"_": text}
    return found if isinstance(found, dict) else {"_": found}


def _counts(new: int, *, created: int = 0, found: int = 0, output: int = 0) -> dict[str, int]:
    """The three counts of input add up to the prompt."""
    return {
        "input_tokens": new,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": found,
        "output_tokens": output,
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (data["type"].encode(), _encode(data))

"""From the bytes of TensorRT-LLM's answer to token deltas. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from attrs import evolve

from commutator.engine.server_events import DONE, ServerEvents
from commutator.errors import EngineError
from commutator.types import FinishReason, TokenDelta, TokenLogprob
from commutator_trtllm.api import Choice, Chunk
from commutator_trtllm.handover import WHOLE

__all__ = ["DeltaReader", "FailedInStreamError", "failure_of"]

_decode = msgspec.json.Decoder(Chunk).decode

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "not_finished": FinishReason.LENGTH,
    "cancelled": FinishReason.ABORT,
    "timeout": FinishReason.ABORT,
}
_GOES_ON = ("length", "not_finished")
"""How a context server ends a leg that a generation server is to go on with."""


class FailedInStreamError(EngineError):
    """The server reports a failure after it had begun to answer."""


class DeltaReader:
    """Feed it what arrives; the end is held back until what follows it (usage) has come."""

    def __init__(self) -> None:
        self._events = ServerEvents()
        self._last: TokenDelta | None = None
        self.began = False
        """Something of the answer has come."""
        self.ended = False
        """The answer was complete."""

    def feed(self, data: bytes) -> Iterator[TokenDelta]:
        """Deltas of server-sent events. Raises FailedInStreamError; EngineError if unreadable."""
        for payload in self._events.feed(data):
            if payload == DONE:
                yield from self._end()
            else:
                yield from self._on_chunk(_read(payload))

    def whole(self, body: bytes) -> Iterator[TokenDelta]:
        """The deltas of a context server's answer: one, with what the decode leg must know."""
        chunk = _read(body)
        yield from self._on_chunk(chunk)
        if self._last is not None:
            self._last = evolve(self._last, handover=_handed(chunk.choices[0]))
        yield from self._end()

    def _on_chunk(self, chunk: Chunk) -> Iterator[TokenDelta]:
        if (failure := failure_of(chunk)) is not None:
            raise FailedInStreamError(failure)
        for choice in chunk.choices:
            self.began = True
            token_ids = tuple(choice.token_ids or ())
            delta = TokenDelta(token_ids, _logprobs(choice, token_ids))
            if choice.finish_reason is None:
                yield delta
            else:
                reason = _REASONS.get(choice.finish_reason, FinishReason.ABORT)
                self._last = evolve(delta, finish_reason=reason, stop_reason=choice.stop_reason)
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            if self._last is not None:
                self._last = evolve(self._last, cached_tokens=cached)

    def _end(self) -> Iterator[TokenDelta]:
        if self._last is not None:
            self.ended = True
            yield self._last
            self._last = None


def failure_of(chunk: Chunk) -> str | None:
    """What an error says; None if it is none. There are three forms."""
    if chunk.object == "error":
        return chunk.message or "TensorRT-LLM failed the request"
    if isinstance(chunk.error, Mapping):
        return str(chunk.error.get("message", chunk.error))
    return None if chunk.error is None else str(chunk.error)


def _handed(choice: Choice) -> Mapping[str, Any] | None:
    # An answer that ended with its first token needs no generation server, and has no KV for it.
    return choice.disaggregated_params if choice.finish_reason in _GOES_ON else WHOLE


def _logprobs(choice: Choice, token_ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    if choice.logprobs is None:
        return ()
    values = choice.logprobs.token_logprobs
    if len(values) != len(token_ids):
        raise EngineError(
            f"TensorRT-LLM answered {len(values)} logprobs for {len(token_ids)} tokens"
        )
    return tuple(
        TokenLogprob(token, 0.0 if value is None else value)
        for token, value in zip(token_ids, values, strict=True)
    )


def _read(payload: bytes) -> Chunk:
    try:
        return _decode(payload)
    except msgspec.MsgspecError as error:
        raise EngineError(f"TensorRT-LLM answered what is not understood: {error}") from error

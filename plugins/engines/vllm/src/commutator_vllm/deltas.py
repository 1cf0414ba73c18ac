"""From the bytes of vLLM's answer to token deltas. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from attrs import evolve

from commutator.engine.server_events import DONE, ServerEvents
from commutator.errors import EngineError
from commutator.types import FinishReason, TokenDelta, TokenLogprob
from commutator_vllm.api import Chunk, Failure, Logprobs

__all__ = ["DeltaReader", "FailedInStreamError"]

_ID_MARK = "token_id:"

_decode = msgspec.json.Decoder(Chunk).decode


class FailedInStreamError(EngineError):
    """vLLM reports a failure after it had begun to answer."""

    def __init__(self, failure: Failure) -> None:
        self.code = failure.code
        super().__init__(failure.message or "vLLM failed the request")


class DeltaReader:
    """Feed it what arrives; the end is held back until what follows it (usage) has come."""

    def __init__(self, top_logprobs: int | None) -> None:
        self._top = top_logprobs
        self._events = ServerEvents()
        self._last: TokenDelta | None = None
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
        """The deltas of an answer that did not come as a stream: one."""
        chunk = _read(body)
        yield from self._on_chunk(chunk)
        if self._last is not None:
            self._last = evolve(self._last, handover=chunk.kv_transfer_params)
        yield from self._end()

    def _on_chunk(self, chunk: Chunk) -> Iterator[TokenDelta]:
        if chunk.error is not None:
            raise FailedInStreamError(chunk.error)
        for choice in chunk.choices:
            logprobs = () if choice.logprobs is None else self._logprobs(choice.logprobs)
            delta = TokenDelta(tuple(choice.token_ids or ()), logprobs)
            if choice.finish_reason is None:
                yield delta
            else:
                reason = _REASONS.get(choice.finish_reason, FinishReason.STOP)
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

    def _logprobs(self, logprobs: Logprobs) -> tuple[TokenLogprob, ...]:
        top = self._top or 0
        if logprobs.content is not None:
            return tuple(
                TokenLogprob(
                    entry.token_id,
                    entry.logprob,
                    _best([(one.token_id, one.logprob) for one in entry.top_logprobs], top),
                )
                for entry in logprobs.content
            )
        tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
        return tuple(
            TokenLogprob(
                _token_id(token),
                0.0 if value is None else value,
                _best([(_token_id(t), v) for t, v in (others or {}).items()], top),
            )
            for token, value, others in zip(
                logprobs.tokens, logprobs.token_logprobs, tops, strict=True
            )
        )


_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
}


def _best(entries: Sequence[tuple[int, float]], count: int) -> tuple[tuple[int, float], ...]:
    """Without the chosen token, which vLLM adds, where it is not among the likeliest."""
    return tuple(sorted(dict(entries).items(), key=lambda entry: -entry[1])[:count])


def _token_id(text: str) -> int:
    return int(text.removeprefix(_ID_MARK))


def _read(payload: bytes) -> Chunk:
    try:
        return _decode(payload)
    except msgspec.MsgspecError as error:
        raise EngineError(f"vLLM answered what is not understood: {error}") from error

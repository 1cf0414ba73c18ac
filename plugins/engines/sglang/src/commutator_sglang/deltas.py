"""From the bytes of SGLang's answer to token deltas. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec
from attrs import evolve

from commutator.engine.server_events import DONE, ServerEvents
from commutator.errors import EngineError
from commutator.types import FinishReason, TokenDelta, TokenLogprob
from commutator_sglang.api import Chunk, FinishedBecause, Logprob, MetaInfo

__all__ = ["DeltaReader", "FailedInStreamError", "message_of"]

_decode = msgspec.json.Decoder(Chunk).decode


class FailedInStreamError(EngineError):
    """SGLang reports that the request failed, by the HTTP status that it would have had."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(message or "SGLang failed the request")


class DeltaReader:
    """Feed it what arrives.

    A server tells with each chunk either what is new or everything so far, as it was started
    (``--incremental-streaming-output``); the count of tokens beside it tells what is new.
    """

    def __init__(self, top_logprobs: int | None, cut_after: Collection[int] = ()) -> None:
        """``cut_after``: tokens that end the answer, which the server does not know of."""
        self._top = top_logprobs
        self._cut_after = cut_after
        self._events = ServerEvents()
        self._tokens = 0
        self._told_cached = False
        self.ended = False
        """The answer was complete."""
        self.cut = False
        """It was ended here; the server goes on."""

    @property
    def begun(self) -> bool:
        """A token has come."""
        return self._tokens > 0

    def feed(self, data: bytes) -> Iterator[TokenDelta]:
        """Deltas of server-sent events. Raises FailedInStreamError; EngineError if unreadable."""
        for payload in self._events.feed(data):
            if payload != DONE:
                yield from self._on_chunk(_read(payload))

    def _on_chunk(self, chunk: Chunk) -> Iterator[TokenDelta]:
        if chunk.error is not None:
            raise _failure(chunk.error)
        meta = chunk.meta_info
        if meta is None or self.ended:
            return
        why = meta.finish_reason
        if why is not None and why.type == "abort" and why.status_code is not None:
            raise FailedInStreamError(why.status_code, why.message or "")
        new = meta.completion_tokens - self._tokens
        if new <= 0 and why is None:
            return
        token_ids = tuple(chunk.output_ids[-new:]) if new > 0 else ()
        self._tokens += len(token_ids)
        cached = None if self._told_cached else meta.cached_tokens
        self._told_cached |= cached is not None
        self.ended = why is not None
        delta = TokenDelta(
            token_ids,
            () if self._top is None else self._logprobs(meta, len(token_ids)),
            finish_reason=None if why is None else _REASONS.get(why.type, FinishReason.STOP),
            stop_reason=None if why is None else _stopped_by(why),
            cached_tokens=cached,
            error=None if why is None else why.message,
        )
        yield self._cut_short(delta)

    def _cut_short(self, delta: TokenDelta) -> TokenDelta:
        for number, token in enumerate(delta.token_ids, 1):
            if token in self._cut_after:
                self.cut, self.ended = not self.ended, True
                return evolve(
                    delta,
                    token_ids=delta.token_ids[:number],
                    logprobs=delta.logprobs[:number],
                    finish_reason=FinishReason.STOP,
                    stop_reason=token,
                )
        return delta

    def _logprobs(self, meta: MetaInfo, count: int) -> tuple[TokenLogprob, ...]:
        if not count:
            return ()
        chosen = (meta.output_token_logprobs or [])[-count:]
        tops = (meta.output_top_logprobs or [None] * count)[-count:]
        if len(chosen) != count or len(tops) != count:
            raise EngineError(f"SGLang gave {len(chosen)} logprobs for {count} tokens")
        return tuple(
            TokenLogprob(token, _value(value), self._best(top or []))
            for (value, token, _), top in zip(chosen, tops, strict=True)
        )

    def _best(self, entries: list[Logprob]) -> tuple[tuple[int, float], ...]:
        ordered = sorted(((token, _value(value)) for value, token, _ in entries), key=_by_value)
        return tuple(ordered[: self._top])


_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def message_of(body: bytes) -> str:
    """What an error of SGLang's says."""
    try:
        error = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError:
        return body[:500].decode(errors="replace")
    told = error.get("error", error.get("detail", error))
    return str(told["message"]) if isinstance(told, dict) and "message" in told else str(told)


def _failure(error: Any) -> FailedInStreamError:
    if isinstance(error, dict):
        code = error.get("code")
        return FailedInStreamError(
            code if isinstance(code, int) else 500, str(error.get("message") or "")
        )
    return FailedInStreamError(500, str(error))


def _stopped_by(why: FinishedBecause) -> int | str | None:
    return None if isinstance(why.matched, list) else why.matched


def _by_value(entry: tuple[int, float]) -> float:
    return -entry[1]


def _value(logprob: float | None) -> float:
    return 0.0 if logprob is None else logprob


def _read(payload: bytes) -> Chunk:
    try:
        return _decode(payload)
    except msgspec.MsgspecError as error:
        raise EngineError(f"SGLang answered what is not understood: {error}") from error

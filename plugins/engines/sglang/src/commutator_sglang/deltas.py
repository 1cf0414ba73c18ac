"""Parses the bytes of SGLang's answers into token deltas. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec
from attrs import evolve

from commutator import FinishReason, TokenDelta, TokenLogprob
from commutator.errors import EngineError
from commutator_engine_kit.completions import JsonEvents, failure_of
from commutator_sglang.api import Chunk, FinishedBecause, Logprob, MetaInfo

__all__ = ["DeltaReader"]

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
_decoder = msgspec.json.Decoder(Chunk)


class DeltaReader:
    """Turns received bytes into deltas.

    Each chunk has either the new tokens (``--incremental-streaming-output``) or all tokens so far.
    The token count in the chunk tells which of them are new.
    """

    def __init__(self, top_logprobs: int | None, cut_after: Collection[int] = ()) -> None:
        """``cut_after``: tokens that end the answer here, but not at the server."""
        self._top = top_logprobs
        self._cut_after = cut_after
        self._events = JsonEvents("SGLang", _decoder)
        self._tokens = 0
        self._has_cached = False
        self.ended = False
        """Whether the answer is complete."""
        self.cut = False
        """Whether it was ended by ``cut_after``, so that the server is still generating."""

    @property
    def begun(self) -> bool:
        """Whether a token has arrived."""
        return self._tokens > 0

    def feed(self, data: bytes) -> Iterator[TokenDelta]:
        """The deltas in ``data``, part of a stream of server-sent events.

        Raises FailedAnswerError; EngineError when an event cannot be parsed.
        """
        for chunk in self._events.feed(data):
            if chunk is not None:
                yield from self._on_chunk(chunk)

    def _on_chunk(self, chunk: Chunk) -> Iterator[TokenDelta]:
        if chunk.error is not None:
            raise failure_of("SGLang", chunk.error)
        meta = chunk.meta_info
        if meta is None or self.ended:
            return
        why = meta.finish_reason
        if why is not None and why.type == "abort" and why.status_code is not None:
            raise failure_of("SGLang", {"code": why.status_code, "message": why.message})
        new = meta.completion_tokens - self._tokens
        if new <= 0 and why is None:
            return
        token_ids = tuple(chunk.output_ids[-new:]) if new > 0 else ()
        self._tokens += len(token_ids)
        cached = None if self._has_cached else meta.cached_tokens
        self._has_cached |= cached is not None
        self.ended = why is not None
        delta = TokenDelta(
            token_ids=token_ids,
            logprobs=() if self._top is None else self._logprobs(meta, len(token_ids)),
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
            raise EngineError(f"SGLang sent {len(chosen)} logprobs for {count} tokens")
        return tuple(
            TokenLogprob(token_id=token, logprob=_value(value), top=self._best(top or []))
            for (value, token, _), top in zip(chosen, tops, strict=True)
        )

    def _best(self, entries: list[Logprob]) -> tuple[tuple[int, float], ...]:
        ordered = sorted(((token, _value(value)) for value, token, _ in entries), key=_by_value)
        return tuple(ordered[: self._top])


def _stopped_by(why: FinishedBecause) -> int | str | None:
    return None if isinstance(why.matched, list) else why.matched


def _by_value(entry: tuple[int, float]) -> float:
    return -entry[1]


def _value(logprob: float | None) -> float:
    return 0.0 if logprob is None else logprob

"""The shapes of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commutator.frontend.choice import Piece
from commutator.frontend.plan import Plan
from commutator.frontend.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Finish,
    Usage,
)
from commutator.frontend.shape import MIN_LOGPROB, Shape, encode

__all__ = ["CompletionShape"]


class CompletionShape(Shape):
    """Plain text, with the prompt before it when it is to be echoed."""

    chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(
        self, request_id: str, plan: Plan, *, include_usage: bool, logprobs: int | None
    ) -> None:
        super().__init__(request_id, plan.model, include_usage=include_usage)
        self._text = plan.text
        self._echoes = plan.echoes
        self._logprobs = logprobs

    def first(self, number: int) -> bytes:
        return self._chunk(number, self._echoes[number]) if self._echoes else b""

    def content(self, number: int, piece: Piece) -> bytes:
        logprobs = b"null" if self._logprobs is None else encode(self._lists([piece]))
        return self._chunk(number, piece.text, logprobs)

    def finish(self, number: int, reason: Finish) -> bytes:
        return self._chunk(number, "", finish=encode(reason))

    def answer(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> Completion:
        echoes = self._echoes or [""] * len(choices)
        return Completion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=tuple(
                CompletionChoice(
                    index=number,
                    text=echoes[number] + "".join(piece.text for piece in pieces),
                    logprobs=None if self._logprobs is None else self._lists(pieces),
                    finish_reason=pieces[-1].finish_reason or "stop",
                )
                for number, pieces in enumerate(choices)
            ),
            usage=usage,
        )

    def _chunk(
        self, number: int, text: str, logprobs: bytes = b"null", finish: bytes = b"null"
    ) -> bytes:
        return self.chunk(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}'
            % (number, encode(text), logprobs, finish)
        )

    def _lists(self, pieces: Iterable[Piece]) -> CompletionLogprobs:
        entries = [pair for piece in pieces for pair in piece.logprobs]
        show = self._text.token_text
        return CompletionLogprobs(
            tokens=tuple(show(entry.token_id) for _, entry in entries),
            token_logprobs=tuple(max(entry.logprob, MIN_LOGPROB) for _, entry in entries),
            top_logprobs=tuple(
                {show(token_id): max(logprob, MIN_LOGPROB) for token_id, logprob in entry.top}
                for _, entry in entries
            )
            if self._logprobs
            else None,
            text_offset=tuple(offset for offset, _ in entries),
        )

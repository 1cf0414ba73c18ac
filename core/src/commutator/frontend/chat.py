"""The shapes of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commutator.frontend.choice import Piece
from commutator.frontend.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Finish,
    TokenLogprobs,
    TopLogprob,
    Usage,
)
from commutator.frontend.shape import MIN_LOGPROB, Shape, encode
from commutator.text.model import TextModel
from commutator.types import TokenLogprob

__all__ = ["ChatShape"]


class ChatShape(Shape):
    """Messages with a role."""

    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(
        self,
        request_id: str,
        model: str,
        text: TextModel,
        *,
        include_usage: bool,
        logprobs: bool,
    ) -> None:
        super().__init__(request_id, model, include_usage=include_usage)
        self._text = text
        self._logprobs = logprobs

    def first(self, number: int) -> bytes:
        delta = b'{"role":"assistant","content":"","refusal":null}'
        return self.chunk(
            b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (number, delta)
        )

    def content(self, number: int, piece: Piece) -> bytes:
        logprobs = encode(self._entries([piece])) if self._logprobs else b"null"
        return self.chunk(
            b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}'
            % (number, encode(piece.text), logprobs)
        )

    def finish(self, number: int, reason: Finish) -> bytes:
        return self.chunk(
            b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (number, encode(reason))
        )

    def answer(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            choices=tuple(
                ChatChoice(
                    index=number,
                    message=AssistantMessage("assistant", "".join(p.text for p in pieces)),
                    logprobs=self._entries(pieces) if self._logprobs else None,
                    finish_reason=pieces[-1].finish_reason or "stop",
                )
                for number, pieces in enumerate(choices)
            ),
            usage=usage,
        )

    def _entries(self, pieces: Iterable[Piece]) -> ChatLogprobs:
        return ChatLogprobs(
            tuple(self._entry(entry) for piece in pieces for _, entry in piece.logprobs)
        )

    def _entry(self, entry: TokenLogprob) -> TokenLogprobs:
        chosen = self._top(entry.token_id, entry.logprob)
        alternatives = tuple(self._top(token_id, logprob) for token_id, logprob in entry.top)
        return TokenLogprobs(chosen.token, chosen.logprob, chosen.bytes, alternatives)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            self._text.token_text(token_id),
            max(logprob, MIN_LOGPROB),
            tuple(self._text.token_bytes(token_id)),
        )

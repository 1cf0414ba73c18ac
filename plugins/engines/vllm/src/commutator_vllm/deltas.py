"""vLLM's answers: their parts, and the token deltas in them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from commutator import TokenLogprob
from commutator_engine_kit import completions

__all__ = ["DeltaReader", "likeliest"]

_ID_MARK = "token_id:"


class TokenLogprobEntry(msgspec.Struct):
    """One token and its logprob."""

    token_id: int
    logprob: float


class PositionLogprobs(TokenLogprobEntry):
    """The chosen token at one position; ``top_logprobs`` starts with the same token."""

    top_logprobs: list[TokenLogprobEntry] = []


class Logprobs(msgspec.Struct):
    """Logprobs of new tokens.

    /inference/v1/generate fills ``content``; /v1/completions fills the other fields, where a token
    is written ``token_id:N``.
    """

    content: list[PositionLogprobs] | None = None
    tokens: Sequence[str] = ()
    token_logprobs: Sequence[float | None] = ()
    top_logprobs: Sequence[dict[str, float] | None] = ()


class Choice(completions.Choice):
    """The tokens that one chunk adds to the answer."""

    logprobs: Logprobs | None = None


class Chunk(completions.Chunk):
    """One server-sent event of either endpoint, or a whole answer."""

    choices: Sequence[Choice] = ()
    kv_transfer_params: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(Chunk)


class DeltaReader(completions.CompletionReader[Chunk]):
    """Reads the answers of both endpoints."""

    def __init__(self, top_logprobs: int | None) -> None:
        super().__init__("vLLM", _decoder)
        self._top = top_logprobs or 0

    def handover(self, chunk: Chunk) -> Mapping[str, Any] | None:
        return chunk.kv_transfer_params

    def logprobs(self, choice: Choice) -> tuple[TokenLogprob, ...]:
        logprobs = choice.logprobs
        if logprobs is None:
            return ()
        if logprobs.content is not None:
            return tuple(
                TokenLogprob(
                    token_id=entry.token_id,
                    logprob=entry.logprob,
                    top=self._best([(one.token_id, one.logprob) for one in entry.top_logprobs]),
                )
                for entry in logprobs.content
            )
        tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
        return tuple(
            TokenLogprob(
                token_id=_token_id(token),
                logprob=0.0 if value is None else value,
                top=self._best([(_token_id(t), v) for t, v in (others or {}).items()]),
            )
            for token, value, others in zip(
                logprobs.tokens, logprobs.token_logprobs, tops, strict=True
            )
        )

    def _best(self, entries: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
        return likeliest(dict(entries), self._top)


def likeliest(logprobs: Mapping[int, float], count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest entries. vLLM adds the chosen token, which may not be among them."""
    return tuple(sorted(logprobs.items(), key=lambda entry: -entry[1])[:count])


def _token_id(text: str) -> int:
    return int(text.removeprefix(_ID_MARK))

"""TensorRT-LLM's answers: their parts, and the token deltas in them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from commutator import TokenLogprob
from commutator.errors import EngineError
from commutator_engine_kit import completions
from commutator_trtllm.handover import WHOLE

__all__ = ["DeltaReader"]

_CONTINUES = ("length", "not_finished")
"""Finish reasons of a context server for an answer that a generation server is to continue."""


class Logprobs(msgspec.Struct):
    """The answer names tokens by their text only, which does not identify them."""

    token_logprobs: Sequence[float | None] = ()


class Choice(completions.Choice):
    """The tokens that one chunk adds to the answer."""

    logprobs: Logprobs | None = None
    disaggregated_params: dict[str, Any] | None = None


class Chunk(completions.Chunk):
    """One server-sent event of /v1/completions, or a whole answer, or an error."""

    choices: Sequence[Choice] = ()


_decoder = msgspec.json.Decoder(Chunk)


class DeltaReader(completions.CompletionReader[Chunk]):
    """Reads the answers of /v1/completions."""

    def __init__(self) -> None:
        super().__init__("TensorRT-LLM", _decoder)

    def handover(self, chunk: Chunk) -> Mapping[str, Any] | None:
        choice = chunk.choices[0]
        # An answer that ended with its first token needs no generation server, and hands over no
        # KV.
        return choice.disaggregated_params if choice.finish_reason in _CONTINUES else WHOLE

    def logprobs(self, choice: Choice) -> tuple[TokenLogprob, ...]:
        if choice.logprobs is None:
            return ()
        values, token_ids = choice.logprobs.token_logprobs, choice.token_ids or ()
        if len(values) != len(token_ids):
            raise EngineError(
                f"TensorRT-LLM sent {len(values)} logprobs for {len(token_ids)} tokens"
            )
        return tuple(
            TokenLogprob(token_id=token, logprob=0.0 if value is None else value)
            for token, value in zip(token_ids, values, strict=True)
        )

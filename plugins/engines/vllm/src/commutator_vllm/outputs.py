"""Token deltas from the outputs of vLLM's AsyncLLM, which this module does not import. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from commutator import FinishReason, GenerateRequest, TokenDelta, TokenLogprob
from commutator_engine_kit.completions import finish_reason_named
from commutator_vllm.bodies import hands_over
from commutator_vllm.deltas import likeliest

__all__ = ["OutputReader", "RequestOutput"]

_LEAST_LOGPROB = -9999.0
"""What vLLM's HTTP API says for a probability of zero."""


class CompletionOutput(Protocol):
    """What one step added to an answer."""

    token_ids: Any
    logprobs: Any
    """For each token, a mapping of token ids to objects with ``logprob``; None: not asked for."""
    finish_reason: str | None
    stop_reason: int | str | None


class RequestOutput(Protocol):
    """vLLM's RequestOutput of the kind DELTA, with one answer."""

    outputs: list[Any]
    num_cached_tokens: int | None
    kv_transfer_params: Mapping[str, Any] | None


class OutputReader:
    """Turns the outputs of one request into its deltas."""

    def __init__(self, request: GenerateRequest) -> None:
        self._top = request.sampling.top_logprobs
        self._decodes = request.handover is not None and not hands_over(request.handover)
        self._began = False

    def delta(self, output: RequestOutput) -> TokenDelta | None:
        """None for an output that says nothing."""
        part: CompletionOutput = output.outputs[0]
        token_ids = tuple(part.token_ids)
        if part.finish_reason is not None:
            return self._last(output, part, token_ids)
        if not token_ids:
            return None
        if self._top is None and self._began:  # nearly all
            return TokenDelta(token_ids=token_ids)
        return TokenDelta(
            token_ids=token_ids,
            logprobs=self._logprobs(part, token_ids),
            cached_tokens=self._cached(output),
        )

    def _last(
        self, output: RequestOutput, part: CompletionOutput, token_ids: tuple[int, ...]
    ) -> TokenDelta:
        assert part.finish_reason is not None
        reason = finish_reason_named(part.finish_reason)
        failed = reason is FinishReason.ERROR
        return TokenDelta(
            token_ids=token_ids,
            logprobs=self._logprobs(part, token_ids),
            finish_reason=reason,
            stop_reason=part.stop_reason,
            cached_tokens=self._cached(output),
            handover=output.kv_transfer_params,
            error="vLLM failed the request; its log says why" if failed else None,
            # A server that fails a decode request did not get the KV.
            handover_failed=failed and self._decodes,
        )

    def _cached(self, output: RequestOutput) -> int | None:
        if self._began:
            return None
        self._began = True
        return output.num_cached_tokens

    def _logprobs(
        self, part: CompletionOutput, token_ids: tuple[int, ...]
    ) -> tuple[TokenLogprob, ...]:
        if self._top is None or part.logprobs is None:
            return ()
        return tuple(map(self._logprob, token_ids, part.logprobs))

    def _logprob(self, token_id: int, position: Mapping[int, Any]) -> TokenLogprob:
        known = {token: _bounded(entry.logprob) for token, entry in position.items()}
        return TokenLogprob(
            token_id=token_id,
            logprob=known.get(token_id, _LEAST_LOGPROB),
            top=likeliest(known, self._top or 0),
        )


def _bounded(logprob: float) -> float:
    return _LEAST_LOGPROB if math.isnan(logprob) else max(logprob, _LEAST_LOGPROB)

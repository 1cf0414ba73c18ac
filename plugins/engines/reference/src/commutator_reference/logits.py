"""What is done to a row of logits before a token is chosen from it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from commutator.types import SamplingParams

__all__ = ["adjust", "is_adjusted", "keep_likeliest", "keep_top_p"]

_TOP_P_CANDIDATES = 1024
"""How many of the likeliest tokens are tried before the whole vocabulary is sorted."""


def is_adjusted(params: SamplingParams, output_length: int) -> bool:
    """Whether ``adjust`` would change anything."""
    return (
        output_length < params.min_tokens
        or bool(params.logit_bias)
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def adjust(
    logits: Tensor,
    params: SamplingParams,
    tokens: Sequence[int],
    prompt_length: int,
    stop_ids: Collection[int],
) -> Tensor:
    """A copy of ``logits`` [vocabulary] with minimum length, bias and penalties applied.

    In vLLM's order. The repetition penalty looks at prompt and output, the presence and frequency
    penalties at the output alone.
    """
    logits = logits.clone()
    if len(tokens) - prompt_length < params.min_tokens and stop_ids:
        logits[list(stop_ids)] = -torch.inf
    if params.logit_bias:
        biases = torch.tensor(list(params.logit_bias.values()), device=logits.device)
        logits[list(params.logit_bias)] += biases.to(logits.dtype)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(tokens, device=logits.device).unique()
        old = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(old > 0, old / penalty, old * penalty)
    output = tokens[prompt_length:]
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.tensor(output, device=logits.device).unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    return logits


def keep_likeliest(probabilities: Tensor, params: SamplingParams) -> Tensor:
    """``probabilities`` [vocabulary] with what min_p, top_k and top_p exclude set to 0.

    Applied in this order, each to what the one before left; not renormalized.
    """
    if params.min_p > 0.0:
        likely = probabilities >= params.min_p * probabilities.max()
        probabilities = torch.where(likely, probabilities, 0.0)
    if 0 < params.top_k < len(probabilities):
        values, ids = probabilities.topk(params.top_k)
        probabilities = torch.zeros_like(probabilities).scatter_(0, ids, values)
    if params.top_p < 1.0:
        probabilities = keep_top_p(probabilities, params.top_p)
    return probabilities


def keep_top_p(probabilities: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens that holds ``top_p`` of the mass; 0 elsewhere."""
    wanted = top_p * probabilities.sum(dtype=torch.float64)
    values, ids = probabilities.topk(min(_TOP_P_CANDIDATES, len(probabilities)))
    mass = values.cumsum(0, dtype=torch.float64)
    if mass[-1] < wanted:
        values, ids = probabilities.sort(descending=True)
        mass = values.cumsum(0, dtype=torch.float64)
    # A token stays while the tokens before it hold less than the wanted mass; the first always.
    kept = 1 + int((mass[:-1] < wanted).sum())
    return torch.zeros_like(probabilities).scatter_(0, ids[:kept], values[:kept])

"""Chooses the next token of each sequence from its logits."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many
from hashlib import blake2b

import torch
from attrs import frozen
from torch import Tensor

from commutator import SamplingParams, TokenLogprob
from commutator_reference.sequence import Sequence, stop_ids

__all__ = ["Sampled", "adjust", "is_adjusted", "keep_likeliest", "keep_top_p", "sample", "uniform"]

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
    tokens: Many[int],
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

    Applied in this order, each to the result of the one before; not renormalized.
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
    # A token stays while the tokens before it hold less than ``top_p``; the first always stays.
    kept = 1 + int((mass[:-1] < wanted).sum())
    return torch.zeros_like(probabilities).scatter_(0, ids[:kept], values[:kept])


_GREEDY_BELOW = 1e-5
"""Temperatures below this mean the likeliest token."""


@frozen
class Sampled:
    """The chosen token and, when requested, its probability."""

    token_id: int
    logprob: TokenLogprob | None = None


def sample(
    logits: Tensor, sequences: Many[Sequence], eos_token_ids: Collection[int]
) -> list[Sampled]:
    """One token for each row of ``logits`` [sequences, vocabulary], float32.

    A row's outcome depends on its own sequence only: its logits, parameters, tokens and seed.
    Raises FloatingPointError when logits are not finite.
    """
    best = logits.max(dim=-1)
    if not best.values.isfinite().all():
        raise FloatingPointError("the model's logits are not finite: bad weights, or an overflow")
    likeliest: list[int] = best.indices.tolist()
    return [
        Sampled(token)
        if _takes_likeliest(sequence)
        else _sample_row(logits[row], sequence, eos_token_ids)
        for row, (sequence, token) in enumerate(zip(sequences, likeliest, strict=True))
    ]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments only, so that it survives preemption.

    48 random bits: times any float64 below 2**1023 the product stays below that float.
    """
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


def _takes_likeliest(sequence: Sequence) -> bool:
    params = sequence.sampling
    return (
        params.temperature < _GREEDY_BELOW
        and params.top_logprobs is None
        and not is_adjusted(params, sequence.output_length)
    )


def _sample_row(logits: Tensor, sequence: Sequence, eos_token_ids: Collection[int]) -> Sampled:
    params, raw = sequence.sampling, logits
    if is_adjusted(params, sequence.output_length):
        stops = stop_ids(params, eos_token_ids)
        logits = adjust(logits, params, sequence.tokens, sequence.prompt_length, stops)
    token_id = _choose(logits, params, sequence.seed, len(sequence.tokens))
    if params.top_logprobs is None:
        return Sampled(token_id)
    return Sampled(token_id, _logprob(raw, token_id, params.top_logprobs))


def _choose(logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    if params.temperature < _GREEDY_BELOW:
        return int(logits.argmax())
    probabilities = keep_likeliest(torch.softmax(logits / params.temperature, dim=-1), params)
    # Inverse transform sampling in the order of token ids: tokens of nearly equal probability
    # keep their places when rounding differs from one batch to another.
    cumulative = probabilities.cumsum(0, dtype=torch.float64)
    point = cumulative[-1] * uniform(seed, position)
    return int(torch.searchsorted(cumulative, point, right=True))


def _logprob(logits: Tensor, token_id: int, top: int) -> TokenLogprob:
    logprobs = torch.log_softmax(logits, dim=-1)
    best = logprobs.topk(top)
    likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(token_id=token_id, logprob=float(logprobs[token_id]), top=tuple(likeliest))

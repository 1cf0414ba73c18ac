"""Chooses the next token of each sequence from its logits."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many
from hashlib import blake2b

import torch
from attrs import frozen
from torch import Tensor

from commutator.types import SamplingParams, TokenLogprob
from commutator_reference.logits import adjust, is_adjusted, keep_likeliest
from commutator_reference.sequence import Sequence
from commutator_reference.stopping import stop_ids

__all__ = ["Sampled", "sample", "uniform"]

_GREEDY_BELOW = 1e-5
"""Temperatures below this mean the likeliest token."""


@frozen
class Sampled:
    """The chosen token and, when asked for, its probability."""

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
    return TokenLogprob(token_id, float(logprobs[token_id]), tuple(likeliest))

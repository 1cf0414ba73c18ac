"""What a request may ask for, how its next token is chosen from logits, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Many
from hashlib import blake2b

import torch
from attrs import frozen
from torch import Tensor

from commutator import (
    FinishReason,
    GenerateRequest,
    OptionType,
    RequestOption,
    SamplingParams,
    TokenLogprob,
)
from commutator.errors import RequestError
from commutator_reference.scheduler import Sequence

Decode = Callable[[Many[int]], str]
"""Text of some tokens; a partial character may decode to a replacement character."""

_SPARE_TOKENS = 8
"""Tokens decoded beyond a stop string's length, because some tokens add no text."""

_MOST_PROMPT_LOGPROBS = 1024
_TOP_P_CANDIDATES = 1024
"""How many of the likeliest tokens are tried before the whole vocabulary is sorted."""


def validate_request(
    request: GenerateRequest, *, vocab_size: int, max_model_len: int, can_decode: bool
) -> None:
    """Raise RequestError for the first thing wrong with ``request``.

    ``can_decode`` says whether the engine can turn tokens into text, which stop strings need.
    """
    tokens, sampling = request.token_ids, request.sampling
    if not tokens:
        raise RequestError("the prompt has no tokens", "prompt")
    if len(tokens) + 1 > max_model_len:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens; with at least one to generate, this engine "
            f"takes {max_model_len} in all",
            "prompt",
            "context_length_exceeded",
        )
    ids = {
        "prompt": tokens,
        "logit_bias": sampling.logit_bias,
        "stop_token_ids": sampling.stop_token_ids,
        "allowed_token_ids": request.options.get("allowed_token_ids", ()),
        "logprob_token_ids": request.options.get("logprob_token_ids", ()),
    }
    for param, values in ids.items():
        # A model has no row for other ids, and indexing one would fail the whole batch.
        wrong = next((token for token in values if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is not between 0 and {vocab_size - 1}", param)
    for param, right, problem in _sampling_rules(sampling, vocab_size):
        if not right:
            raise RequestError(f"{param} must be {problem}", param)
    done = request.generated_prefix
    if not 0 <= done < min(len(tokens), sampling.max_tokens):
        raise RequestError(
            f"generated_prefix is {done}: expected less than max_tokens ({sampling.max_tokens}), "
            f"and less than the {len(tokens)} tokens that it is the end of",
            "generated_prefix",
        )
    for param, problem in _unsupported(request, can_decode=can_decode):
        raise RequestError(f"the reference engine {problem}", param)


def _sampling_rules(sampling: SamplingParams, vocab_size: int) -> Iterator[tuple[str, bool, str]]:
    s = sampling
    yield "max_tokens", s.max_tokens >= 1, "at least 1"
    yield "min_tokens", 0 <= s.min_tokens <= s.max_tokens, "from 0 to max_tokens"
    yield "temperature", 0 <= s.temperature < math.inf, "a finite number of at least 0"
    yield "top_p", 0 < s.top_p <= 1, "above 0 and at most 1"
    yield "top_k", s.top_k >= 0, "at least 0"
    yield "min_p", 0 <= s.min_p <= 1, "from 0 to 1"
    yield "repetition_penalty", 0 < s.repetition_penalty < math.inf, "a finite number above 0"
    for param in ("presence_penalty", "frequency_penalty"):
        yield param, math.isfinite(getattr(s, param)), "a finite number"
    yield "logit_bias", all(map(math.isfinite, s.logit_bias.values())), "finite numbers"
    top = 0 if s.top_logprobs is None else s.top_logprobs
    yield "top_logprobs", 0 <= top <= vocab_size, f"from 0 to {vocab_size}"
    yield "stop", "" not in s.stop, "strings that are not empty"


OPTIONS: Mapping[str, RequestOption] = {
    "bad_words": RequestOption(
        type=OptionType.STRINGS, description="Words that must not be generated."
    ),
    "allowed_token_ids": RequestOption(
        type=OptionType.INTEGERS,
        minimum=0,
        most=1 << 20,
        description="The only tokens that may be generated.",
    ),
    "logprob_token_ids": RequestOption(
        type=OptionType.INTEGERS,
        minimum=0,
        most=128,
        description="Tokens whose log probabilities are returned instead of the likeliest ones.",
    ),
}
"""What requests may ask of this engine beside what every engine does."""


def _unsupported(request: GenerateRequest, *, can_decode: bool) -> Iterator[tuple[str, str]]:
    if request.sampling.stop and not can_decode:
        yield "stop", "was started without a tokenizer, which stop strings need; use stop_token_ids"
    if request.prompt_logprobs is not None and request.handover is not None:
        yield "prompt_logprobs", "computes none of a prompt that it hands over or is handed over"
    top = request.prompt_logprobs
    if top is not None and not 0 <= top <= _MOST_PROMPT_LOGPROBS:
        yield "prompt_logprobs", f"takes 0 to {_MOST_PROMPT_LOGPROBS} of them at each place"
    if request.data_parallel_rank not in {None, 0}:
        yield "data_parallel_rank", f"has rank 0 only, not {request.data_parallel_rank}"


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
    params = sequence.request.sampling
    return (
        params.temperature < _GREEDY_BELOW
        and params.top_logprobs is None
        and not sequence.request.options
        and not is_adjusted(params, sequence.output_length)
        and sequence.matcher is None
    )


def _sample_row(logits: Tensor, sequence: Sequence, eos_token_ids: Collection[int]) -> Sampled:
    params, raw = sequence.request.sampling, logits
    if is_adjusted(params, sequence.output_length):
        stops = _stop_ids(params, eos_token_ids)
        logits = adjust(logits, params, sequence.tokens, sequence.prompt_length, stops)
    options = sequence.request.options
    if allowed := options.get("allowed_token_ids"):
        logits = _only(logits, allowed)
    if sequence.bad_words:
        logits = forbid(logits, sequence.bad_words, sequence.tokens[sequence.prompt_length :])
    if sequence.matcher is not None:
        left = params.max_tokens - sequence.output_length
        logits = sequence.matcher.allow(logits, raw, left, params.max_tokens)
    token_id = _choose(logits, params, sequence.seed, len(sequence.tokens))
    if params.top_logprobs is None:
        return Sampled(token_id)
    if named := options.get("logprob_token_ids"):
        return Sampled(token_id, _named_logprobs(raw, token_id, named))
    return Sampled(token_id, _logprob(raw, token_id, params.top_logprobs))


def _only(logits: Tensor, allowed: Many[int]) -> Tensor:
    ids = torch.tensor(allowed, device=logits.device)
    return torch.full_like(logits, -torch.inf).index_copy_(0, ids, logits[ids])


def forbid(logits: Tensor, words: Many[Many[int]], output: Many[int]) -> Tensor:
    """``logits`` without the tokens that would complete one of ``words``."""
    last = [
        word[-1] for word in words if len(word) == 1 or [*output[1 - len(word) :]] == [*word[:-1]]
    ]
    if not last:
        return logits
    logits = logits.clone()
    logits[last] = -torch.inf
    return logits


def prompt_logprobs(logits: Tensor, token_ids: Many[int], top: int) -> list[TokenLogprob]:
    """Those of ``token_ids``, each by its row of ``logits`` [tokens, vocabulary]."""
    logprobs = torch.log_softmax(logits, dim=-1)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = logprobs.gather(1, ids)
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    best = logprobs.topk(top)
    rows = zip(
        token_ids,
        chosen[:, 0].tolist(),
        ranks.tolist(),
        best.indices.tolist(),
        best.values.tolist(),
        strict=True,
    )
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=logprob,
            top=tuple(zip(indices, values, strict=True)),
            rank=rank,
        )
        for token_id, logprob, rank, indices, values in rows
    ]


def _named_logprobs(logits: Tensor, token_id: int, named: Many[int]) -> TokenLogprob:
    logprobs = torch.log_softmax(logits, dim=-1)
    known = {one: float(logprobs[one]) for one in named}
    best = tuple(sorted(known.items(), key=lambda entry: -entry[1]))
    return TokenLogprob(token_id=token_id, logprob=float(logprobs[token_id]), top=best)


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


@frozen
class Stop:
    """Why a request ends with its newest token."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None


def _stop_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> set[int]:
    """The tokens that end this request."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}


def find_stop(
    sequence: Sequence,
    eos_token_ids: Collection[int],
    max_model_len: int,
    decode: Decode | None,
) -> Stop | None:
    """Whether the newest token ends the request. Before ``min_tokens`` nothing but length does.

    The ending token stays in the output; ``stop_reason`` names a stop id or string, and is None
    for the end-of-sequence token, as in vLLM.
    """
    params, token = sequence.request.sampling, sequence.tokens[-1]
    hurried = sequence.matcher is not None and sequence.matcher.hurried
    of_itself = Stop(FinishReason.LENGTH if hurried else FinishReason.STOP)
    if sequence.matcher is not None and sequence.matcher.complete:
        return of_itself
    if sequence.output_length >= params.min_tokens:
        if token in eos_token_ids and not params.ignore_eos:
            return of_itself
        if token in params.stop_token_ids:
            return Stop(FinishReason.STOP, token)
        if params.stop and decode is not None:
            found = _completed_stop_string(sequence, params.stop, decode)
            if found is not None:
                return Stop(FinishReason.STOP, found)
    is_full = len(sequence.tokens) >= max_model_len
    if is_full or sequence.output_length >= params.max_tokens:
        return Stop(FinishReason.LENGTH)
    return None


def _completed_stop_string(sequence: Sequence, stop: tuple[str, ...], decode: Decode) -> str | None:
    """The first of the stop strings that the newest token completed."""
    tail, text = _tail(sequence, max(map(len, stop)), decode)
    candidates = [string for string in stop if string in text]
    if not candidates:
        return None
    # It may have been complete before min_tokens were reached.
    before = decode(tail[:-1])
    return next((s for s in candidates if text.count(s) > before.count(s)), None)


def _tail(sequence: Sequence, characters: int, decode: Decode) -> tuple[list[int], str]:
    """The last output tokens, enough for ``characters`` characters of text, and that text."""
    length = characters + _SPARE_TOKENS
    while True:
        start = max(sequence.prompt_length, len(sequence.tokens) - length)
        tail = sequence.tokens[start:]
        text = decode(tail)
        if len(text) >= characters + _SPARE_TOKENS or start == sequence.prompt_length:
            return tail, text
        length *= 2

"""Which requests tell how fast a worker is, and what they tell.

Of workers that generate, a prompt of each length from ``FIRST_PROMPT_TOKENS`` on, doubled until one
takes too long; the longest of them again; then batches of 1, 2, 4, ... requests that decode
together. Of workers that only make vectors, requests with more and more tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from statistics import median

from attrs import frozen

from commutator.contract.planner import EnginePerformance
from commutator_slo.performance import Fit, Sample, fit

FIRST_PROMPT_TOKENS = 64
_LENGTHS = 5
_REPEATS = 3
_LONGEST_TTFT_S = 2.5
"""Prompts are not made longer once one takes this long."""
_MOST_PROMPT_TOKENS = 16_384
_SHORT_PROMPT_TOKENS = 8
_BATCH_S = 5.0
"""A batch should take about this long."""
_FEWEST_TOKENS, _MOST_TOKENS = 12, 128
_START = EnginePerformance(
    prefill_tokens_per_s=2000.0,
    step_s=0.02,
    step_request_s=0.001,
    max_running=256,
    max_step_tokens=2048,
    kv_tokens=262_144,
)
"""Where the fit begins."""


@frozen
class Answered:
    """One answer: when its request was sent, when its first and its last token came."""

    sent_s: float
    first_s: float
    ended_s: float
    prompt_tokens: int
    """None of which the worker had cached."""
    tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def itl_s(self) -> float:
        """Mean time between its tokens."""
        return (self.ended_s - self.first_s) / max(1, self.tokens - 1)


Send = Callable[[int, int, int], Awaitable[Sequence[Answered]]]
"""Sends so many requests at once to one worker that has no others.

Their prompts have so many tokens, which no cache holds, and every answer so many. Raises
CommutatorError.
"""


@frozen(kw_only=True)
class Profile:
    """How fast a worker is, with what was measured."""

    fit: Fit
    ttft_s: Sequence[tuple[int, float]]
    """Median time to the first token by prompt tokens."""
    itl_s: Sequence[tuple[int, float]]
    """Mean time between tokens by requests that decode at once."""


async def profile(send: Send, *, longest: int, most_requests: int) -> Profile:
    """Measure a worker.

    ``longest``: of prompt and answer together, in tokens; ``most_requests``: in the largest batch.
    """
    answers: list[Sequence[Answered]] = []

    async def ask(requests: int, prompt_tokens: int, tokens: int) -> Sequence[Answered]:
        answers.append(await send(requests, prompt_tokens, tokens))
        return answers[-1]

    await send(1, _SHORT_PROMPT_TOKENS, 2)  # the first request of all is not like the others
    lengths: list[int] = []
    length = FIRST_PROMPT_TOKENS
    while length <= min(longest - 2, _MOST_PROMPT_TOKENS):
        (one,) = await ask(1, length, 2)
        lengths.append(length)
        if one.ttft_s > _LONGEST_TTFT_S:
            break
        length *= 2
    for _ in range(_REPEATS - 1):
        for length in lengths[-_LENGTHS:]:
            await ask(1, length, 2)
    (one,) = await ask(1, _SHORT_PROMPT_TOKENS, _FEWEST_TOKENS)
    itl_s, requests = one.itl_s, 1
    while requests <= most_requests:
        tokens = round(min(max(_FEWEST_TOKENS, _BATCH_S / itl_s), _MOST_TOKENS))
        tokens = min(tokens, longest - _SHORT_PROMPT_TOKENS)
        batch = await ask(requests, _SHORT_PROMPT_TOKENS, tokens)
        itl_s = max(one.itl_s for one in batch)
        requests *= 2
    return _profiled(answers)


SendInputs = Callable[[int, int], Awaitable[float]]
"""Sends one request with so many inputs of so many tokens, and returns the seconds that it took.

The worker has no other. Raises CommutatorError.
"""


async def profile_inputs(send: SendInputs, *, longest: int) -> Profile:
    """Measure a worker that makes vectors; ``longest``: of one input, in tokens.

    Of steps, which no token needs, the profile says where the fit begins.
    """
    each = min(FIRST_PROMPT_TOKENS, longest)
    await send(1, each)  # the first request of all is not like the others
    taken_s: dict[int, list[float]] = {}
    inputs = 1
    while inputs * each <= _MOST_PROMPT_TOKENS:
        taken_s[inputs] = [await send(inputs, each)]
        if taken_s[inputs][0] > _LONGEST_TTFT_S:
            break
        inputs *= 2
    for _ in range(_REPEATS - 1):
        for inputs in [*taken_s][-_LENGTHS:]:
            taken_s[inputs].append(await send(inputs, each))
    samples = [
        Sample(seconds=seconds, prompt_tokens=inputs * each, first_tokens=1)
        for inputs, found in taken_s.items()
        for seconds in found
    ]
    return Profile(
        fit=fit(samples, _START),
        ttft_s=[(inputs * each, median(found)) for inputs, found in taken_s.items()],
        itl_s=(),
    )


def _profiled(answers: Sequence[Sequence[Answered]]) -> Profile:
    """What batches of answers tell."""
    samples: list[Sample] = []
    ttft_s: dict[int, list[float]] = {}
    itl_s: dict[int, float] = {}
    for batch in answers:
        for one in batch:
            samples += _samples(one, batch)
        if len(batch) == 1 and batch[0].prompt_tokens >= FIRST_PROMPT_TOKENS:
            ttft_s.setdefault(batch[0].prompt_tokens, []).append(batch[0].ttft_s)
        else:
            itl_s[len(batch)] = sum(one.itl_s for one in batch) / len(batch)
    return Profile(
        fit=fit(samples, _START),
        ttft_s=[(tokens, median(found)) for tokens, found in sorted(ttft_s.items())],
        itl_s=sorted(itl_s.items()),
    )


def _samples(one: Answered, batch: Sequence[Answered]) -> list[Sample]:
    """The time to the first token of a lone request, and that of the other tokens of each."""
    if len(batch) == 1 and one.prompt_tokens >= FIRST_PROMPT_TOKENS:
        # Of its few further tokens nothing is to be learnt.
        return [Sample(seconds=one.ttft_s, prompt_tokens=one.prompt_tokens, first_tokens=1)]
    generated = prompts = 0.0
    for other in batch:
        both_s = min(one.ended_s, other.ended_s) - max(one.first_s, other.first_s)
        if both_s > 0:
            generated += (other.tokens - 1) * both_s / max(1e-9, other.ended_s - other.first_s)
        if one.first_s < other.first_s < one.ended_s:
            prompts += other.prompt_tokens
    return [
        Sample(
            seconds=one.ended_s - one.first_s,
            steps=one.tokens - 1,
            step_requests=generated,
            prompt_tokens=prompts,
        )
    ]

"""How fast a worker is, fitted to how long its tokens took. Pure.

What a request waits for at a worker is a sum: ``step_s`` for each forward step, ``step_request_s``
for each request that decodes in one, ``1 / prefill_tokens_per_s`` for each prompt token computed
meanwhile, and for a first token what it costs beside (connections, the wait for a running step).
A ``Sample`` counts these for a stretch of time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import evolve, frozen

from commutator.contract.planner import EnginePerformance

__all__ = [
    "Fit",
    "Sample",
    "fit",
]

_TERMS = 4
"""Steps, requests in steps, prompt tokens, first tokens."""
_PAIRS = tuple((i, j) for i in range(_TERMS) for j in range(i, _TERMS))
_SWEEPS = 20_000
"""At most; terms that are much alike take long to be told apart."""
_CLOSE = 1e-9
_FIRST_TOKEN_S = 0.005
"""Where the fit of what a first token costs beside its prompt begins."""
_FARTHEST = 1000.0
_PRIOR = 1e-9
"""Weight of where the fit begins: only what no sample tells stays there."""


@frozen(kw_only=True)
class Sample:
    """One stretch of time at one worker, and what was computed in it."""

    seconds: float
    """Above 0."""
    steps: float = 0.0
    """Forward steps with requests that decode."""
    step_requests: float = 0.0
    """Requests that decoded in each of these, added up: the tokens that the worker generated."""
    prompt_tokens: float = 0.0
    """Prompt tokens that it computed."""
    first_tokens: int = 0
    """1 where it ends with the first token of an answer."""


@frozen(kw_only=True)
class _Sums:
    """Sums over samples, each in parts of its own time: relative errors count alike."""

    count: int = 0
    """Number of samples."""
    terms: tuple[float, ...] = (0.0,) * _TERMS
    """Of each term."""
    products: tuple[float, ...] = (0.0,) * len(_PAIRS)
    """Of the products of terms, (0, 0), (0, 1), ... (3, 3)."""

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            count=self.count + other.count,
            terms=tuple(a + b for a, b in zip(self.terms, other.terms, strict=True)),
            products=tuple(a + b for a, b in zip(self.products, other.products, strict=True)),
        )


def _sums_of(sample: Sample) -> _Sums:
    """The sums of one sample."""
    parts = [
        sample.steps / sample.seconds,
        sample.step_requests / sample.seconds,
        sample.prompt_tokens / sample.seconds,
        sample.first_tokens / sample.seconds,
    ]
    return _Sums(
        count=1, terms=tuple(parts), products=tuple(parts[i] * parts[j] for i, j in _PAIRS)
    )


@frozen(kw_only=True)
class Fit:
    """The speed of a worker, and how well samples agree with it."""

    performance: EnginePerformance
    first_token_s: float
    """What a first token costs beside its prompt."""
    residual: float
    """Root of the mean square of the relative errors; 0.1: 10 %."""
    samples: int
    """Their number."""


def fit(samples: Sequence[Sample], prior: EnginePerformance) -> Fit:
    """The speed that explains the samples with the least relative error.

    ``prior`` is where the fit begins, and what it says where samples tell nothing. No speed is
    taken to be negative, nor more than a thousand times from it.
    """
    sums = _Sums()
    for one in samples:
        sums += _sums_of(one)
    return _fitted(sums, prior)


def _fitted(sums: _Sums, prior: EnginePerformance) -> Fit:
    start = (
        max(prior.step_s, 1e-9),
        max(prior.step_request_s, 1e-9),
        1 / prior.prefill_tokens_per_s,
        _FIRST_TOKEN_S,
    )
    # In units of the prior, so that a sweep over the terms converges in a few rounds.
    matrix = [[0.0] * _TERMS for _ in range(_TERMS)]
    for (i, j), product in zip(_PAIRS, sums.products, strict=True):
        matrix[i][j] = matrix[j][i] = product * start[i] * start[j]
    wanted = [term * unit for term, unit in zip(sums.terms, start, strict=True)]
    least = (1 / _FARTHEST, 0.0, 1 / _FARTHEST, 0.0)
    found = [1.0] * _TERMS
    for _ in range(_SWEEPS):
        moved = 0.0
        for i in range(_TERMS):
            held = matrix[i][i] + _PRIOR
            rest = sum(matrix[i][j] * found[j] for j in range(_TERMS) if j != i)
            value = min(max((wanted[i] + _PRIOR - rest) / held, least[i]), _FARTHEST)
            moved = max(moved, abs(value - found[i]))
            found[i] = value
        if moved < _CLOSE:
            break
    step_s, step_request_s, token_s, first_s = (
        value * unit for value, unit in zip(found, start, strict=True)
    )
    return Fit(
        performance=evolve(
            prior,
            step_s=step_s,
            step_request_s=step_request_s,
            prefill_tokens_per_s=1 / token_s,
        ),
        first_token_s=first_s,
        residual=_residual(sums.count, matrix, wanted, found),
        samples=sums.count,
    )


def _residual(
    count: int,
    matrix: Sequence[Sequence[float]],
    wanted: Sequence[float],
    found: Sequence[float],
) -> float:
    if count <= 0:
        return 0.0
    explained = 2 * sum(w * f for w, f in zip(wanted, found, strict=True))
    squares = sum(matrix[i][j] * found[i] * found[j] for i in range(_TERMS) for j in range(_TERMS))
    return math.sqrt(max(0.0, count - explained + squares) / count)

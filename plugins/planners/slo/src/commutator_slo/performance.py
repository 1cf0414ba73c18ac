"""How fast a worker is, fitted to how long its tokens took. Pure.

What a request waits for at a worker is a sum: ``step_s`` for each forward step, ``step_request_s``
for each request that decodes in one, ``1 / prefill_tokens_per_s`` for each prompt token computed
meanwhile, and for a first token what it costs beside (connections, the wait for a running step).
A ``Sample`` counts these for a stretch of time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from attrs import evolve, frozen

from commutator.contract.planner import EnginePerformance, SampleSums

_TERMS = 4
"""Steps, requests in steps, prompt tokens, first tokens."""
_PAIRS = tuple((i, j) for i in range(_TERMS) for j in range(i, _TERMS))
"""Of the products in ``SampleSums``."""
_FIRST_TOKEN_S = 0.005
"""Where the fit of what a first token costs beside its prompt begins."""
_FARTHEST = 1000.0
_BOUNDS = tuple((1 / _FARTHEST if i in (0, 2) else 0.0, _FARTHEST) for i in range(_TERMS))
"""Of each unknown, in units of where the fit begins."""
_LITTLE = 1e-9
"""Samples as which the prior counts: only what no sample tells stays as it says."""


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


def sums_of(sample: Sample) -> SampleSums:
    """The sums of one sample."""
    parts = [
        sample.steps / sample.seconds,
        sample.step_requests / sample.seconds,
        sample.prompt_tokens / sample.seconds,
        sample.first_tokens / sample.seconds,
    ]
    return SampleSums(
        count=1.0,
        terms=tuple(parts),
        products=tuple(parts[i] * parts[j] for i, j in _PAIRS),
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
    sums = SampleSums()
    for one in samples:
        sums += sums_of(one)
    return fit_sums(sums, prior)


def fit_sums(sums: SampleSums, prior: EnginePerformance, prior_samples: float = _LITTLE) -> Fit:
    """The same of sums over samples; the prior counts as much as ``prior_samples`` of them."""
    start = _units(prior, _FIRST_TOKEN_S)
    # In units of the prior: each unknown is about 1.
    matrix = [[0.0] * _TERMS for _ in range(_TERMS)]
    for (i, j), product in zip(_PAIRS, sums.products, strict=True):
        matrix[i][j] = matrix[j][i] = product * start[i] * start[j]
    wanted = [term * unit for term, unit in zip(sums.terms, start, strict=True)]
    found = _least(matrix, wanted, prior_samples)
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
        samples=round(sums.count),
    )


def explained_part(sums: SampleSums, performance: EnginePerformance, first_token_s: float) -> float:
    """The mean part of the samples' times that a speed explains; 1 where it is right, 0 of none."""
    if not sums.count:
        return 0.0
    units = _units(performance, first_token_s)
    return sum(term * unit for term, unit in zip(sums.terms, units, strict=True)) / sums.count


def _units(performance: EnginePerformance, first_token_s: float) -> tuple[float, ...]:
    """What one of each term takes, in seconds."""
    return (
        max(performance.step_s, 1e-9),
        max(performance.step_request_s, 1e-9),
        1 / performance.prefill_tokens_per_s,
        first_token_s,
    )


def _least(
    matrix: Sequence[Sequence[float]], wanted: Sequence[float], prior_samples: float
) -> list[float]:
    """The least squares within bounds, exactly: each unknown is at a bound or free."""
    held = [[*row] for row in matrix]
    aims = [one + prior_samples for one in wanted]
    for i in range(_TERMS):
        held[i][i] += prior_samples
    best: tuple[float, list[float]] | None = None
    for sides in itertools.product((None, *range(2)), repeat=_TERMS):
        found = [0.0 if side is None else _BOUNDS[i][side] for i, side in enumerate(sides)]
        free = [i for i, side in enumerate(sides) if side is None]
        rest = [aims[i] - sum(held[i][j] * found[j] for j in range(_TERMS)) for i in free]
        solved = _solved([[held[i][j] for j in free] for i in free], rest)
        if solved is None:
            continue
        for i, value in zip(free, solved, strict=True):
            found[i] = value
        if any(not low <= value <= high for value, (low, high) in zip(found, _BOUNDS, strict=True)):
            continue
        loss = sum(
            found[i] * (sum(held[i][j] * found[j] for j in range(_TERMS)) - 2 * aims[i])
            for i in range(_TERMS)
        )
        if best is None or loss < best[0]:
            best = loss, found
    assert best is not None, "all unknowns at bounds is always a solution"
    return best[1]


def _solved(matrix: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float] | None:
    """The solution of a few linear equations, which are symmetric; None where there is not one."""
    rows = [[*row, value] for row, value in zip(matrix, wanted, strict=True)]
    for i in range(len(rows)):
        pivot = max(range(i, len(rows)), key=lambda row: abs(rows[row][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if not rows[i][i]:
            return None
        for j in range(len(rows)):
            if j != i:
                factor = rows[j][i] / rows[i][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]


def _residual(
    count: float,
    matrix: Sequence[Sequence[float]],
    wanted: Sequence[float],
    found: Sequence[float],
) -> float:
    if count <= 0:
        return 0.0
    told = 2 * sum(w * f for w, f in zip(wanted, found, strict=True))
    squares = sum(matrix[i][j] * found[i] * found[j] for i in range(_TERMS) for j in range(_TERMS))
    return math.sqrt(max(0.0, count - told + squares) / count)

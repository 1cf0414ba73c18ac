"""Whether one of two versions is worse, from requests that were divided between them by chance.

Both judges use it: that of a new version of a model, and that of a new value of an option. Pure.

``MoreOften`` and ``Higher`` may be asked after every request. Each is a bet that gains nothing on
average where the second version is no worse: so its stake ever grows to 1 / p with a probability of
at most p, however often one looks (Ville's inequality), and however the load or the health of both
changes meanwhile, because only requests of the same seconds are compared.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import product

from attrs import evolve, frozen

_RATIOS = (3.0, 6.0, 64.0)
"""By how many times more often something may happen, on which equal parts of the stake are bet."""
_BETS = ((2.0, 0.5), (4.0, 0.5), (4.0, 1.0), (8.0, 1.0))
"""Of each (p, part): the part is bet on the density p * u ** (p - 1) of ranks u between 0 and 1,
and the rest is kept. Large powers tell great differences soon, small parts small ones at all."""
_FEWEST_BEFORE = 20
"""Requests of the first version that those of the second are compared with."""
_MOST_BEFORE = 500


@frozen
class MoreOften:
    """Evidence that something happens more often with the second version than with the first."""

    _logs: tuple[float, ...] = (0.0,) * len(_RATIOS)
    _waiting: tuple[int, int, int, int] = (0, 0, 0, 0)
    """As for ``add``: what waits for enough others."""

    def add(self, hits: int, of: int, more_hits: int, more_of: int) -> MoreOften:
        """With requests that ended at about the same time.

        ``hits`` of ``of`` are the first version's, ``more_hits`` of ``more_of`` the second's.
        Without a difference, each hit is one of the second with the probability that a request is.
        """
        new = (hits, of, more_hits, more_of)
        hits, of, more_hits, more_of = map(sum, zip(self._waiting, new, strict=True))
        if of < _FEWEST_BEFORE or not more_of:
            return evolve(self, waiting=(hits, of, more_hits, more_of))
        odds = more_of / of
        logs = []
        for log, ratio in zip(self._logs, _RATIOS, strict=True):
            fair, bet = odds / (1 + odds), ratio * odds / (1 + ratio * odds)
            won, lost = math.log(bet / fair), math.log((1 - bet) / (1 - fair))
            logs.append(log + more_hits * won + hits * lost)
        return MoreOften(tuple(logs))

    @property
    def log_stake(self) -> float:
        """The natural logarithm of the stake; 0 before the first request."""
        return _log_mean(self._logs)


@frozen
class Higher:
    """Evidence that values are higher with the second version, by more than a tolerance."""

    tolerance: float = 0.0
    """What does not count: 0.25 means a quarter more."""
    _logs: tuple[float, ...] = (0.0,) * len(_BETS)
    _before: tuple[float, ...] = ()
    """Values that wait for enough others, oldest first."""
    _after: tuple[float, ...] = ()

    def add(self, before: Sequence[float], after: Sequence[float]) -> Higher:
        """With values, 0 or more, of about the same time by the first version and the second.

        Without a difference, the rank of each among those before it is any with equal probability.
        """
        lower = 1 / (1 + self.tolerance)
        new = (*self._after, *(value * lower for value in after))
        old = (*self._before, *before)[-_MOST_BEFORE:]
        if not new or len(old) < _FEWEST_BEFORE:
            return evolve(self, before=old, after=new[-_MOST_BEFORE:])
        ranked = sorted(old)
        logs = self._logs
        for value in new:
            below, upto = bisect_left(ranked, value), bisect_right(ranked, value)
            # The middle of the ranks that it could have: the densities are convex, so the mean of
            # a bet does not exceed 1 by that.
            rank = ((below + upto) / 2 + 0.5) / (len(ranked) + 1)
            logs = tuple(
                log + math.log(1 - part + part * power * rank ** (power - 1))
                for log, (power, part) in zip(logs, _BETS, strict=True)
            )
            insort(ranked, value)
        return evolve(self, logs=logs, before=(), after=())

    @property
    def log_stake(self) -> float:
        """As ``MoreOften.log_stake``."""
        return _log_mean(self._logs)


def _log_mean(logs: Sequence[float]) -> float:
    top = max(logs)
    return top + math.log(sum(math.exp(one - top) for one in logs) / len(logs))


def gain_by_chance(differences: Sequence[float]) -> float:
    """How probable it is that a value without any effect seems to gain as much.

    ``differences`` are those of the logarithms of mean delays, with the value and without, of each
    pair of periods. Which of the two periods had the value was drawn. So if the value has no
    effect, each difference could as well have the other sign, however much load or anything else
    has changed from one period to the next: the probability is the part of all combinations of
    signs whose sum is as low.
    """
    total = sum(differences) + 1e-9 * sum(map(abs, differences))  # equal sums differ by rounding
    flips = list(product((1, -1), repeat=len(differences)))
    as_low = sum(
        sum(sign * one for sign, one in zip(signs, differences, strict=True)) <= total
        for signs in flips
    )
    return as_low / len(flips)


def pooled_z(hits: int, of: int, more_hits: int, more_of: int) -> float:
    """By how many standard deviations the second proportion exceeds the first."""
    if not of or not more_of:
        return 0.0
    pooled = (hits + more_hits) / (of + more_of)
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / of + 1 / more_of))
    return (more_hits / more_of - hits / of) / deviation if deviation else 0.0

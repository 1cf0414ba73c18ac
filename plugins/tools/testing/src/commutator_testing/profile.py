"""How much the suites try: fast by default, more with ``COMMUTATOR_SUITES=thorough``."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

VARIABLE = "COMMUTATOR_SUITES"
_TIMES = 10


def is_thorough(value: str) -> bool:
    """Whether a value of the variable asks for more. Raises ValueError for unknown values."""
    if value not in {"", "fast", "thorough"}:
        raise ValueError(f'{VARIABLE}: expected "fast" or "thorough", got "{value}"')
    return value == "thorough"


THOROUGH = is_thorough(os.environ.get(VARIABLE, ""))
"""Try ten times as many cases, and look for the shortest history that fails."""


def examples(fast: int) -> int:
    """The number of random cases for a test that has ``fast`` of them in the fast profile."""
    return fast * _TIMES if THOROUGH else fast


def suite_settings(fast: int) -> settings:
    """For a test that many plugins inherit, whose cases are large values to draw."""
    return settings(
        deadline=None,
        max_examples=examples(fast),
        suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    )

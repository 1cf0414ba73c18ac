"""How long to wait before restarting a failed process."""

from __future__ import annotations

from attrs import frozen

__all__ = ["Backoff"]


@frozen
class Backoff:
    """Waits that double with each failure in a row, from ``first_s`` to ``longest_s`` seconds.

    The count restarts after a process was healthy for ``longest_s``.
    """

    first_s: float
    longest_s: float
    failures: int = 0
    """In a row so far."""

    def after_failure(self, healthy_s: float) -> tuple[Backoff, float]:
        """The next state and the seconds to wait now.

        ``healthy_s``: how long the process that failed had been ready.
        """
        failures = 0 if healthy_s >= self.longest_s else self.failures
        # The exponent is bounded because 2.0 ** 1024 overflows.
        wait_s = min(self.longest_s, self.first_s * 2.0 ** min(failures, 64))
        return Backoff(self.first_s, self.longest_s, failures + 1), wait_s

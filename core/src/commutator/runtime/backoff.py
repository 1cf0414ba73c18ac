"""How long to wait before a failed process is started again."""

from __future__ import annotations

from attrs import frozen

__all__ = ["Backoff"]


@frozen
class Backoff:
    """Doubles with each failure in a row, up to a limit; health for that long starts it anew."""

    first_s: float
    longest_s: float
    failures: int = 0
    """In a row, without a healthy spell of ``longest_s`` between them."""

    def after_failure(self, healthy_s: float) -> tuple[Backoff, float]:
        """The next state and the seconds to wait. ``healthy_s``: how long it had been ready."""
        failures = 0 if healthy_s >= self.longest_s else self.failures
        # The exponent is bounded because 2.0 ** 1024 overflows.
        wait_s = min(self.longest_s, self.first_s * 2.0 ** min(failures, 64))
        return Backoff(self.first_s, self.longest_s, failures + 1), wait_s

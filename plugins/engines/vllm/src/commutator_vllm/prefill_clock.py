"""How fast prompts are computed, from the times at which steps begin. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["PrefillClock"]

_FEWEST_TOKENS = 64
"""Steps with less say more about their overhead than about the speed."""
_FORGETTING = 0.8


class PrefillClock:
    """Where steps overlap, the time between two begins is that of the step ``lag`` before."""

    def __init__(self, lag: int = 0) -> None:
        self._steps: deque[int] = deque([0] * lag, maxlen=lag + 1)
        self._last_s: float | None = None
        self._last: frozenset[str] = frozenset()
        self.tokens_per_s: float | None = None
        """None before the first measurement."""

    def step(self, prefill_tokens: int, request_ids: Iterable[str], now_s: float) -> None:
        """A step begins, with so many prompt tokens of these requests and others.

        Steps that share no request with the one before may have waited for one.
        """
        requests = frozenset(request_ids)
        if self._last_s is not None and self._steps and requests & self._last:
            tokens, seconds = self._steps[0], now_s - self._last_s
            if tokens >= _FEWEST_TOKENS and seconds > 0:
                speed, old = tokens / seconds, self.tokens_per_s
                keep = _FORGETTING
                self.tokens_per_s = speed if old is None else keep * old + (1 - keep) * speed
        self._steps.append(prefill_tokens)
        self._last_s, self._last = now_s, requests

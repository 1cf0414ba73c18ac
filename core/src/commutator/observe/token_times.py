"""When the tokens of one answer came."""

from __future__ import annotations

import time

from commutator.observe.tallies import Histogram

__all__ = ["TokenTimes"]


class TokenTimes:
    """Times one answer's tokens."""

    def __init__(self, ttft: Histogram, itl: Histogram, model: str, arrived_s: float) -> None:
        self._ttft = ttft
        self._itl = itl
        self._model = model
        self._last_s = arrived_s
        self._arrived_s = arrived_s
        self.ttft_s: float | None = None

    def tokens(self, count: int) -> None:
        """``count`` tokens have just come together."""
        now_s = time.perf_counter()
        if self.ttft_s is None:
            self.ttft_s = now_s - self._arrived_s
            self._ttft.observe(self.ttft_s, self._model)
        else:
            self._itl.observe((now_s - self._last_s) / count, self._model)
        self._last_s = now_s

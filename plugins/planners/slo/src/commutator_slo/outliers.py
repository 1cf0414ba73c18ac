"""Prompts that no number of workers computes near the target, while they are rare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import frozen

FAR = 4.0
"""An outlier takes this many times as long as the target."""
FEW = 8
"""From this many of them within ``_TOGETHER_S`` on, they are demand, and no outliers."""
_TOGETHER_S = 600.0
_REMEMBERED_S = 3600.0
_LEVEL_S = 60.0


@frozen
class _Window:
    time_s: float
    number: int
    tokens: float
    """Of all of them."""


@frozen
class Outliers:
    """The prompts that were far too long for the target; never changed in place.

    A worker that is started for one prompt does not make it faster, and the minute in which it came
    says nothing about the next. So what is beyond the target's length counts as work of the time in
    which ``FEW`` of them came, at most an hour. Within ten minutes they are demand like any.
    """

    windows: tuple[_Window, ...] = ()
    time_s: float = 0.0
    """Of the last of all windows."""

    def after(
        self, time_s: float, lengths: Mapping[int, int], prompt_tokens: int, longest: float
    ) -> Outliers:
        """The state after a window with prompts of these ``lengths``, in ``length_bucket``.

        ``prompt_tokens``: of all; ``longest``: tokens that a worker computes within the target.
        """
        far = {bucket: n for bucket, n in lengths.items() if bucket > FAR * longest}
        windows = self.windows
        if number := sum(far.values()):
            tokens = sum(bucket * n for bucket, n in far.items())
            windows = (*windows, _Window(time_s, number, min(tokens, prompt_tokens)))
        kept: list[_Window] = []
        found = 0
        for window in reversed(windows):
            age_s = time_s - window.time_s
            if age_s > _REMEMBERED_S or (found >= FEW and age_s > _LEVEL_S):
                break
            kept.append(window)
            found += window.number
        return Outliers(tuple(reversed(kept)), time_s)

    @property
    def rare(self) -> bool:
        """Whether they are no demand."""
        return self._number < FEW or self.time_s - self.windows[0].time_s > _TOGETHER_S

    @property
    def _number(self) -> int:
        return sum(window.number for window in self.windows)

    def excess(self, longest: float) -> float:
        """Tokens beyond ``longest`` of those that came in the last window, if they are rare."""
        if not self.rare:
            return 0.0
        return sum(
            max(0.0, window.tokens - window.number * longest)
            for window in self.windows
            if window.time_s == self.time_s
        )

    def excess_per_s(self, longest: float) -> float:
        """Tokens a second beyond ``longest``, over the time in which they came, if rare."""
        if not self.windows or not self.rare:
            return 0.0
        span_s = _REMEMBERED_S
        if self._number >= FEW:
            span_s = self.time_s - self.windows[0].time_s
        total = sum(max(0.0, one.tokens - one.number * longest) for one in self.windows)
        return total / span_s

    def backlog(self, tokens: int, time_s: float, tokens_per_s: float, lead_s: float) -> int:
        """Of a backlog what further workers can help.

        An outlier that is computed before one is ready needs none, nor do the requests behind it.
        Any other needs at most one, for these.
        """
        left = list(self._left_s(time_s, tokens_per_s))
        if not self.rare or not left:
            return tokens
        late = sum(one.number for one, left_s in left if left_s > lead_s)
        return min(tokens, round(late * lead_s * tokens_per_s))

    def disturb(self, time_s: float, tokens_per_s: float) -> bool:
        """Whether one is computed, or what waited for it."""
        return self.rare and any(self._left_s(time_s, tokens_per_s))

    def _left_s(self, time_s: float, tokens_per_s: float) -> Iterator[tuple[_Window, float]]:
        """Those that are computed, or were for as long, and the seconds until they are done."""
        for one in self.windows:
            takes_s = one.tokens / one.number / tokens_per_s
            left_s = one.time_s + takes_s - time_s
            if left_s > -takes_s:
                yield one, left_s

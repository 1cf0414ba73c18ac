"""Pauses: how far demand fell, when it came back, and whether growing late can be afforded."""

from __future__ import annotations

import math

from attrs import evolve, frozen

_PAUSE = 0.4
"""When demand falls below this part at once, a pause begins: it may come back as fast."""
_KEPT = 2 / 3
"""In a pause that may end, this part of the workers stays; it ends with this part of the demand."""
_AGAIN = 1.25
"""A pause is taken for one like those before it for this many times as long as they were."""
_REMEMBERED_S = 10_800.0
_MOST_PAUSES = 16
_RISES = 1.5
"""A need this many times the least of the last minute rises, by more than chance."""
_COUNTED_S = 60.0
"""Demand is counted over this time, so a burst that begins is seen to rise for as long."""
_SPARED_S = 7200.0
"""Requests that were in time, or were not, count by this exponential time constant."""


@frozen
class _Peak:
    time_s: float
    need: int
    requests_per_s: float


@frozen(kw_only=True)
class Returns:
    """What is remembered of the pauses of one role; never changed in place."""

    recent: tuple[tuple[float, int], ...] = ()
    """The needs of the last minute, with their times."""
    peaks: tuple[_Peak, ...] = ()
    """Those of the last hold, each followed by smaller ones only."""
    fell: _Peak | None = None
    """What was needed before the present pause, with the time when it began."""
    pauses: tuple[tuple[float, float], ...] = ()
    """When demand came back, and after how many seconds."""

    def after(
        self, now_s: float, need: int, requests_per_s: float, hold_s: float, longest_s: float
    ) -> Returns:
        """The state with a further need.

        A pause begins when demand has fallen within ``hold_s`` and the time that it is counted
        over, and is forgotten after ``longest_s``.
        """
        recent = tuple(one for one in self.recent if one[0] > now_s - _COUNTED_S)
        peaks = [one for one in self.peaks if one.time_s > now_s - hold_s - _COUNTED_S]
        while peaks and peaks[-1].requests_per_s <= requests_per_s:
            peaks.pop()
        peaks.append(_Peak(now_s, need, requests_per_s))
        fell, pauses = self.fell, self.pauses
        if fell is None:
            if requests_per_s < _PAUSE * peaks[0].requests_per_s:
                fell = evolve(peaks[0], time_s=now_s)
        elif now_s - fell.time_s > longest_s:
            fell = None
        elif requests_per_s >= _KEPT * fell.requests_per_s:
            pauses = (*pauses, (now_s, now_s - fell.time_s))[-_MOST_PAUSES:]
            fell = None
        pauses = tuple(one for one in pauses if one[0] > now_s - _REMEMBERED_S)
        return Returns(
            recent=(*recent, (now_s, need)), peaks=tuple(peaks), fell=fell, pauses=pauses
        )

    def held(self, workers: int, lead_s: float, spare: float | None) -> str | None:
        """Why the role must not shrink to ``workers`` in this pause; None: it may.

        ``lead_s``: until a worker started later is ready; ``spare``: the requests that may still
        miss the targets, None where it is not known how many did.
        """
        if self.fell is None or max(1, workers) >= _KEPT * self.fell.need:
            return None
        needs = [need for _, need in self.recent]
        if needs[-1] >= max(1, _RISES * min(needs)):
            return "demand rises"
        paused_s = self.recent[-1][0] - self.fell.time_s
        usual_s = max((length_s for _, length_s in self.pauses), default=0.0)
        if paused_s < _AGAIN * usual_s:
            return f"demand came back after {usual_s:.0f} s before"
        late = self.fell.requests_per_s * lead_s * (1 - workers / self.fell.need)
        if spare is not None and late > spare:
            return (
                f"to grow again would make about {late:.0f} requests late, and "
                f"{max(0.0, spare):.0f} may be"
            )
        return None


def spared(
    spare: float | None, requests: int, missed: float | None, allowed: float, window_s: float
) -> float | None:
    """The requests that may miss the targets after a window, by how many did; None: not known.

    ``missed``: the part of the window's requests; ``allowed``: the part that may.
    """
    if missed is None:
        if spare is None:
            return None
        missed = 0.0
    kept = math.exp(-window_s / _SPARED_S)
    return (spare or 0.0) * kept + requests * (allowed - missed)

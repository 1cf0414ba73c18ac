"""The planner `clairvoyant`: a schedule of workers made from the trace itself. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from commutator.contract.planner import (
    EnginePerformance,
    Observation,
    PlannerPolicy,
    Proposal,
    Sizing,
)
from commutator.contract.worker import Role
from commutator_replay.trace import TraceRequest, uncached_tokens

_ROUNDING = 1e-9


class Schedule(PlannerPolicy[float | None]):
    """Knows the work of the trace: the square root rule for each minute's largest work.

    Its state is the time at which the trace began.
    """

    interval_s = 5.0

    def __init__(self, role: Role, margin: float, work: Sequence[float], lead_s: float) -> None:
        """``work``: seconds of a full worker that arrive each second of the trace.

        ``margin``: workers beyond the work, in square roots of it. A worker is launched ``lead_s``
        before it is needed.
        """
        self._role = role
        self._margin = margin
        self._lead_s = lead_s
        mean = _mean_of_last(work, 30)
        self._most = [max(mean[start : start + 60]) for start in range(0, max(1, len(mean)), 60)]

    def begin(self) -> float | None:
        return None

    def propose(self, state: float | None, seen: Observation) -> tuple[float, Sizing]:
        begun_s = seen.time_s if state is None else state
        workers = self.workers_at(seen.time_s - begun_s)
        proposal = Proposal(workers=workers, reason=f"need {workers}")
        return begun_s, Sizing(roles={self._role: proposal})

    def workers_at(self, now_s: float) -> int:
        """Workers that are ready or starting at this second of the trace."""
        last = int((now_s + self._lead_s + self.interval_s) // 60)
        minutes = self._most[int(now_s // 60) : last + 1]
        most = max(minutes, default=0.0)
        return max(1, math.ceil(most + self._margin * math.sqrt(most) - _ROUNDING))


def _mean_of_last(values: Sequence[float], number: int) -> list[float]:
    means, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - number] if index >= number else 0.0)
        means.append(max(0.0, total) / number)
    return means


def work_by_second(trace: Sequence[TraceRequest], performance: EnginePerformance) -> list[float]:
    """Seconds of a full worker that arrive in each second, where no prompt is computed twice."""
    begun_s = trace[0].timestamp / 1000
    work = [0.0] * (math.ceil(trace[-1].timestamp / 1000 - begun_s) + 1)
    for one, tokens in zip(trace, uncached_tokens(trace), strict=True):
        second = int(one.timestamp / 1000 - begun_s)
        work[second] += performance.work_s(tokens, one.output_length)
    return work

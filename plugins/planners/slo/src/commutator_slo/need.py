"""How many workers a role needs: the fewest that keep waiting times within the targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from attrs import frozen

from commutator.contract.planner import EnginePerformance, PlannerTargets
from commutator.contract.worker import Role
from commutator_slo.queueing import Queue, decode_rate, running_requests, smallest

_MOST_WORKERS = 100_000
_CLEAR_S = 30.0
"""Workers for a backlog have this long to clear it, once they are ready."""
_BUCKET = 2**0.25
_LEAST_STEPS = 1.5
"""Workers are sized for no shorter time between tokens than that of this many lone steps."""


@frozen(kw_only=True)
class Demand:
    """What a role has to serve."""

    requests_per_s: float
    """Arrivals of the last minute, as the number of requests of usual length that are as much
    work."""
    prompt_lengths: Mapping[int, float]
    """Weight of requests by the prompt tokens that this role computes, in ``length_bucket``; 0
    where another role computes all."""
    context_tokens: float
    """Mean tokens of a prompt, cached ones included."""
    output_tokens: float
    """Mean tokens of an answer; 0 for the role prefill."""
    gap_variation: float
    """Squared coefficient of variation of the gaps between arrivals; 1 for a Poisson process."""
    growth: float
    """The forecast: the factor by which demand may grow until a worker started now is ready."""
    backlog_tokens: int
    """Prompt tokens that have arrived and are not computed."""


@frozen(kw_only=True)
class Situation:
    """What decides about needs."""

    targets: PlannerTargets
    """The latencies to reach."""
    lead_s: float
    """Seconds until a worker started now is ready."""
    demands: Mapping[Role, Demand]
    """By role, for each role of the fleet."""
    performance: Mapping[Role, EnginePerformance]
    """How fast a worker of each role is."""
    supply: Mapping[Role, int]
    """Workers of each role that are ready or will be."""


@frozen(kw_only=True)
class Need:
    """The number of workers that a role needs."""

    workers: int
    """0 or more; bounds, budget and holds come later."""
    reason: str
    """Why, in one line, for people."""
    warning: str | None = None
    """What no number of workers can help, such as a target below the time of one prompt."""


NeedOf = Callable[[Situation], Mapping[Role, Need]]
"""Says what each role in ``Situation.demands`` needs, from the situation alone.

The same number must answer "may the fleet shrink?" and "must it grow?", so that it does not flap:
the holds that make shrinking slow come later.
"""


def needs(situation: Situation, headroom: float = 0.0) -> Mapping[Role, Need]:
    """What each role needs by ``need``, for ``1 + headroom`` times the demand."""
    return {
        role: _need(role, demand, situation, headroom) for role, demand in situation.demands.items()
    }


def _need(role: Role, demand: Demand, situation: Situation, headroom: float) -> Need:
    performance = situation.performance[role]
    factor = demand.growth * (1 + headroom)
    workers = need(role, demand, performance, situation.targets, situation.lead_s, factor=factor)
    prompt_tokens = _mean(demand.prompt_lengths)
    work_s = performance.work_s(prompt_tokens, demand.output_tokens)
    work = demand.requests_per_s * work_s
    reason = f"work {work:.2f}, growth {demand.growth:.2f} in {situation.lead_s:.0f} s"
    if workers and demand.requests_per_s:
        reason += f", utilisation {work * factor / workers:.2f}"
    limit = situation.targets.ttft_s * performance.prefill_tokens_per_s
    too_long = sum(n for one, n in demand.prompt_lengths.items() if one / _BUCKET > limit)
    allowed = (1 - situation.targets.attainment) * sum(demand.prompt_lengths.values())
    warning = None
    if role is not Role.PREFILL and situation.targets.itl_s < _one_step_s(performance):
        warning = (
            f"{role}: itl_s {situation.targets.itl_s:g} cannot be reached: a step with one "
            f"request takes {_one_step_s(performance):.4g} s"
        )
    elif too_long > allowed:
        warning = (
            f"{role}: ttft_s {situation.targets.ttft_s:g} cannot be reached for prompts over "
            f"{math.floor(limit):,} tokens, by any number of workers"
        )
    return Need(workers=workers, reason=reason, warning=warning)


def need(
    role: Role,
    demand: Demand,
    performance: EnginePerformance,
    targets: PlannerTargets,
    lead_s: float,
    *,
    factor: float = 1.0,
) -> int:
    """The fewest workers that serve ``factor`` times the demand within the targets.

    It never falls when demand grows, and never grows when a target is looser.
    """
    rate_per_s = demand.requests_per_s * factor
    workers = 0
    if rate_per_s > 0:
        enough = partial(_is_enough, role, demand, performance, targets, rate_per_s)
        workers = smallest(enough, 1, _MOST_WORKERS)
    backlog_s = demand.backlog_tokens / performance.prefill_tokens_per_s
    late_s = max(0.0, backlog_s - workers * targets.ttft_s)
    return workers + math.ceil(late_s / max(lead_s + _CLEAR_S, targets.ttft_s))


def _is_enough(
    role: Role,
    demand: Demand,
    performance: EnginePerformance,
    targets: PlannerTargets,
    rate_per_s: float,
    workers: int,
) -> bool:
    lengths, answer = demand.prompt_lengths, demand.output_tokens
    total = sum(lengths.values())
    prompt_tokens = _mean(lengths)
    decodes = role is not Role.PREFILL and answer > 0
    running = 0.0
    if decodes:
        most = decode_rate(
            performance,
            prompt_tokens,
            answer,
            max(targets.itl_s, _LEAST_STEPS * _one_step_s(performance)),
            context_tokens=max(demand.context_tokens, prompt_tokens),
            attainment=targets.attainment,
        )
        if rate_per_s / workers > most:
            return False
        running = running_requests(performance, rate_per_s / workers, prompt_tokens, answer)
    services_s: dict[float, float] = {}
    for tokens, weight in lengths.items():
        if tokens:  # the prompt of the others is computed elsewhere
            service_s = tokens / performance.prefill_tokens_per_s
            if decodes:
                chunk = max(1.0, performance.max_step_tokens - running)
                steps = math.ceil(tokens / chunk)
                service_s += steps * (performance.step_s + performance.step_request_s * running)
            services_s[service_s] = services_s.get(service_s, 0.0) + weight
    if not services_s:
        return True
    queue = Queue(
        servers=workers,
        rate_per_s=rate_per_s * sum(services_s.values()) / total,
        arrival_cv2=demand.gap_variation,
        services_s=services_s,
    )
    return queue.miss_ratio(targets.ttft_s) <= 1 - targets.attainment


def _one_step_s(performance: EnginePerformance) -> float:
    return performance.step_s + performance.step_request_s


def _mean(lengths: Mapping[int, float]) -> float:
    total = sum(lengths.values())
    return sum(tokens * weight for tokens, weight in lengths.items()) / total if total else 0.0

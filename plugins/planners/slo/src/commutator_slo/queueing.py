"""Queueing formulas: how long requests wait, and how many workers keep that within the targets.

Prompts wait as in a queue with several servers (GI/G/c), by the approximation of Sakasegawa;
decoding requests share the steps of a worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

from attrs import frozen

from commutator.contract.planner import EnginePerformance

_LEAST_SLACK = 0.25
"""A prompt that takes most of the target, or more than all of it, may wait for this part of it."""


def _all_busy(servers: int, utilisation: float) -> float:
    """The part of the requests that find every server busy."""
    return math.pow(utilisation, math.sqrt(2 * (servers + 1)) - 1)


def mean_wait_s(
    servers: int, utilisation: float, service_s: float, *, arrival_cv2: float, service_cv2: float
) -> float:
    """Mean time in the queue; infinite from utilisation 1 on."""
    if utilisation >= 1:
        return math.inf
    busy = _all_busy(servers, utilisation)
    return (arrival_cv2 + service_cv2) / 2 * service_s * busy / (servers * (1 - utilisation))


@frozen(kw_only=True)
class Queue:
    """Prompts that wait for one of several workers."""

    servers: int
    rate_per_s: float
    arrival_cv2: float
    services_s: Mapping[float, float]
    """Weight of requests by the seconds of a worker that they take."""

    def miss_ratio(self, target_s: float) -> float:
        """The part of the requests that takes longer than ``target_s``; 1 if the queue grows.

        The time in the queue has an exponential tail. The slack of a request is the target less
        its own service, but never less than a part of the target: what is too long for the target
        must not call for workers that cannot help it.
        """
        total = sum(self.services_s.values())
        mean_s = sum(weight * s for s, weight in self.services_s.items()) / total
        if mean_s <= 0:
            return 0.0
        utilisation = self.rate_per_s * mean_s / self.servers
        if utilisation >= 1:
            return 1.0
        squares = sum(weight * s * s for s, weight in self.services_s.items()) / total
        busy = _all_busy(self.servers, utilisation)
        wait_s = mean_wait_s(
            self.servers,
            utilisation,
            mean_s,
            arrival_cv2=self.arrival_cv2,
            service_cv2=squares / mean_s**2 - 1,
        )
        if wait_s <= 0:
            return 0.0
        tail_s = wait_s / busy
        return sum(
            weight / total * busy * math.exp(-max(target_s - s, _LEAST_SLACK * target_s) / tail_s)
            for s, weight in self.services_s.items()
        )


def running_requests(
    performance: EnginePerformance, rate_per_s: float, prompt_tokens: float, output_tokens: float
) -> float:
    """Mean number of requests that decode at once; infinite if the worker cannot keep up.

    ``prompt_tokens``: those that the worker computes for a request, in the steps of the others.
    """
    spare = 1 - rate_per_s * performance.work_s(prompt_tokens, output_tokens)
    return rate_per_s * output_tokens * performance.step_s / spare if spare > 0 else math.inf


def step_time_s(
    performance: EnginePerformance, prompt_tokens: float, output_tokens: float, running: float
) -> float:
    """Mean time of a step, prompts included, with this many running requests."""
    work_s = performance.work_s(prompt_tokens, output_tokens)
    return performance.step_s + running * work_s / output_tokens


def decode_rate(
    performance: EnginePerformance,
    prompt_tokens: float,
    output_tokens: float,
    itl_s: float,
    *,
    context_tokens: float | None = None,
    attainment: float | None = None,
) -> float:
    """Requests a second that a worker can decode within ``itl_s``, also by batch and KV memory.

    ``prompt_tokens`` are those that it computes itself, of ``context_tokens`` that its memory holds
    (None: the same). On average; with ``attainment``, for that part of the requests, where the
    variance of the number of requests that run at once is its mean.
    """
    work_s = performance.work_s(prompt_tokens, output_tokens)
    if output_tokens <= 0 or work_s <= 0:
        return math.inf
    if itl_s <= performance.step_s:
        return 0.0
    most = (itl_s - performance.step_s) * output_tokens / work_s
    held = prompt_tokens if context_tokens is None else context_tokens
    memory = performance.kv_tokens / (held + output_tokens / 2)
    most = min(most, float(performance.max_running), memory)
    if attainment is not None:
        # n + z sqrt(n) <= most
        spread = max(0.0, NormalDist().inv_cdf(attainment))
        most = math.pow((math.sqrt(spread**2 + 4 * most) - spread) / 2, 2)
    step_s = step_time_s(performance, prompt_tokens, output_tokens, most)
    return most / (output_tokens * step_s) if step_s > 0 else math.inf


def smallest(enough: Callable[[int], bool], least: int, most: int) -> int:
    """The smallest count from ``least`` on that is enough; ``most`` where none below it is.

    ``enough`` must stay true once it is.
    """
    step = 1
    low = high = least
    while high < most and not enough(high):
        low, high, step = high + 1, min(most, high + step), step * 2
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low

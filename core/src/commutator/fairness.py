"""Whose waiting request is next: the kinds `weighted`, the default, and `fifo`.

Pure: calls change the counters, and ``rank`` reads them.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from attrs import define, field, frozen

from commutator.contract.fairness import FairnessConfig, FairnessPolicy
from commutator.contract.settings import Bounds, setting

log = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_MOST_FLOWS = 4096
"""Flows of `weighted` that are remembered, at least; see ``Weighted._forget``."""


class Fifo(FairnessPolicy):
    """One flow for everyone: priority, then arrival, no matter who sent the request."""

    def flow(self, principal: str | None) -> str | None:
        return None

    def rank(self, flow: str | None) -> float:
        return 0.0


@frozen(kw_only=True)
class WeightedConfig(FairnessConfig):
    """Options of `weighted`."""

    generated_token_weight: Annotated[float, Bounds(minimum=0)] = setting(
        "The number of prompt tokens that a generated token counts as; a prompt's cached tokens "
        "count as none.",
        2.0,
    )


@define
class Weighted(FairnessPolicy):
    """Start-time fair queueing of tokens, whose costs are charged as they arise.

    A flow's counter is the cost of what it was served, divided by its weight. The flow with the
    smallest counter is served first, so flows that have requests waiting are served in proportion
    to their weights. The virtual time is the largest counter of a flow at an admission. A flow
    that comes back is lifted to it: it gets no credit for the time in which it asked for nothing.
    It keeps its debt, because a counter above the virtual time is not lowered.
    """

    generated_token_weight: float = 2.0
    _counters: dict[str | None, float] = field(factory=dict)
    _virtual_time: float = 0.0
    _most: int = _MOST_FLOWS

    @property
    def flows(self) -> int:
        """The number of flows whose counters are remembered."""
        return len(self._counters)

    def arrived(self, flow: str | None, weight: float) -> None:
        counters, now = self._counters, self._virtual_time
        counter = counters.get(flow)
        if counter is None:
            self._begin(flow, now)
        elif counter < now:
            counters[flow] = now

    def admitted(self, flow: str | None) -> None:
        rank = self._counters.get(flow, 0.0)
        self._virtual_time = max(self._virtual_time, rank)

    def charge(
        self, flow: str | None, weight: float, prompt_tokens: int, generated_tokens: int
    ) -> None:
        cost = (prompt_tokens + self.generated_token_weight * generated_tokens) / weight
        try:
            self._counters[flow] += cost
        except KeyError:
            self._begin(flow, self._virtual_time + cost)

    def rank(self, flow: str | None) -> float:
        return self._counters.get(flow, self._virtual_time)

    def _begin(self, flow: str | None, counter: float) -> None:
        self._counters[flow] = counter
        if len(self._counters) > self._most:
            self._forget()

    def _forget(self) -> None:
        """Make the counters fewer, at no one's profit.

        A flow at or below the virtual time is lifted to it when it comes back, so its counter is
        not needed. With too many flows above it, the virtual time is raised to half of them, so
        that those forgotten keep their debt. Flows that wait and are forgotten rank equal then,
        in the order of their priorities and arrivals.
        """
        counters = self._counters.items()
        kept = {flow: counter for flow, counter in counters if counter > self._virtual_time}
        if len(kept) > self._most // 2:
            largest = heapq.nlargest(self._most // 2, kept.values())
            self._virtual_time = max(self._virtual_time, largest[-1])
            kept = {flow: c for flow, c in kept.items() if c > self._virtual_time}
        self._counters = kept


_LOG_EVERY = 1000


class Guarded(FairnessPolicy):
    """Passes every call on. A call that raises, or a rank that is no number, counts as rank 0.

    The first of every 1,000 failures is logged.
    """

    def __init__(self, policy: FairnessPolicy) -> None:
        self._policy = policy
        self._failures = 0

    def flow(self, principal: str | None) -> str | None:
        return self._call(self._policy.flow, principal, instead=principal)

    def arrived(self, flow: str | None, weight: float) -> None:
        self._call(self._policy.arrived, flow, weight, instead=None)

    def admitted(self, flow: str | None) -> None:
        self._call(self._policy.admitted, flow, instead=None)

    def charge(
        self, flow: str | None, weight: float, prompt_tokens: int, generated_tokens: int
    ) -> None:
        charge = self._policy.charge
        self._call(charge, flow, weight, prompt_tokens, generated_tokens, instead=None)

    def rank(self, flow: str | None) -> float:
        return self._call(self._finite_rank, flow, instead=0.0)

    def _finite_rank(self, flow: str | None) -> float:
        rank = float(self._policy.rank(flow))
        if not math.isfinite(rank):
            raise ValueError(f"{rank} is no rank; return a finite number")
        return rank

    def _call(self, method: Callable[..., AnswerT], *arguments: Any, instead: AnswerT) -> AnswerT:
        try:
            return method(*arguments)
        except Exception:
            if self._failures % _LOG_EVERY == 0:
                log.exception(
                    "fairness policy %s failed in %s; its flows count as equal "
                    "(failure %d, one in %d is logged)",
                    type(self._policy).__name__, method.__name__.removeprefix("_finite_"),
                    self._failures + 1, _LOG_EVERY,
                )  # fmt: skip
            self._failures += 1
            return instead

"""What the pipeline makes of observations, and whom it asks for needs, growth and limits. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from attrs import frozen

from commutator.contract.planner import EnginePerformance, PlannerTargets
from commutator.contract.worker import Role

__all__ = [
    "Demand",
    "Forecaster",
    "Limit",
    "Need",
    "NeedPolicy",
    "PlanConstraint",
    "Situation",
]

StateT = TypeVar("StateT")


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
    active_requests: int
    """Requests in flight."""


@frozen(kw_only=True)
class Situation:
    """What policies and constraints are told. Equal situations must get equal answers."""

    time_s: float
    """As in the observation."""
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


class NeedPolicy(ABC):
    """Says how many workers the demand needs, from the situation alone.

    The same number must answer "may the fleet shrink?" and "must it grow?", so that it does not
    flap: the holds that make shrinking slow are not the policy's.
    """

    @abstractmethod
    def propose(self, situation: Situation) -> Mapping[Role, Need]:
        """What each role in ``situation.demands`` needs."""


class Forecaster(ABC, Generic[StateT]):
    """Learns how demand grows. Its state goes in and out and is never changed in place.

    A level is the demand of one role over the last minute in seconds of work per second: the number
    of workers that it would keep busy.
    """

    @abstractmethod
    def begin(self) -> StateT:
        """The state before the first level."""

    @abstractmethod
    def update(self, state: StateT, time_s: float, level: float, lead_s: float) -> StateT:
        """The state after the level at ``time_s``, which is later than that of the call before.

        ``lead_s`` is as in ``Situation``.
        """

    @abstractmethod
    def growth(self, state: StateT, lead_s: float) -> float:
        """The factor by which the level may grow within the next ``lead_s`` seconds; above 0.

        Below 1 where the level is above what it usually is only by chance.
        """

    def rests_on_s(self, state: StateT) -> float:
        """Seconds of demand that the growth times the level rests on; at least a minute.

        The fewer requests arrive in that time, the more cautiously a fleet shrinks.
        """
        return 60.0


@frozen(kw_only=True)
class Limit:
    """A floor and a ceiling for the workers of a role."""

    floor: int = 0
    """The fewest workers."""
    ceiling: int | None = None
    """The most workers; None: no limit. Where it is below the floor, the ceiling holds."""
    reason: str
    """Why, in a few words, for people."""


class PlanConstraint(ABC):
    """Limits what policies propose. Keeps nothing between calls."""

    @abstractmethod
    def limits(self, wanted: Mapping[Role, int], situation: Situation) -> Mapping[Role, Limit]:
        """Limits for some of the roles, given the workers that are ``wanted`` so far."""

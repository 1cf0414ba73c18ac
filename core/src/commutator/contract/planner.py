"""Planners: how many workers of each role a deployment needs.

A planner observes what front doors and the fleet tell, and proposes a number of workers. The loop
that asks it is core's: it keeps bounds and budget, and finds the cheapest steps to that number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from enum import StrEnum
from operator import add
from typing import Annotated, Any, Generic, Literal, TypeVar

from attrs import Attribute, Factory, field, frozen

from commutator.contract.settings import (
    Bounds,
    NonNegativeInt,
    PositiveInt,
    PositiveSeconds,
    setting,
)
from commutator.contract.worker import Role

__all__ = [
    "Arrivals",
    "EnginePerformance",
    "Observation",
    "PlannedWorker",
    "PlannerBounds",
    "PlannerBudget",
    "PlannerConfig",
    "PlannerContext",
    "PlannerPolicy",
    "PlannerTargets",
    "Proposal",
    "SampleSums",
    "Sizing",
    "SpeedMeter",
    "TuningConfig",
    "WorkerPhase",
    "length_bucket",
]

StateT = TypeVar("StateT")

_BUCKETS_PER_DOUBLING = 4


def length_bucket(tokens: int) -> int:
    """The bucket of a prompt, as the largest length in it.

    Buckets end at 0, 1, and each power of the fourth root of 2, rounded up to whole tokens.
    """
    if tokens < 1:
        return 0
    step = math.ceil(math.log2(tokens) * _BUCKETS_PER_DOUBLING - 1e-9)
    return math.ceil(2 ** (step / _BUCKETS_PER_DOUBLING) - 1e-9)


# ------------------------------------------------------------------- configuration


@frozen(kw_only=True)
class PlannerTargets:
    """The latencies that the fleet is sized to."""

    ttft_s: PositiveSeconds = setting("Time to the first token.", 0.5)
    itl_s: PositiveSeconds = setting("Mean time between the tokens of an answer.", 0.05)
    attainment: Annotated[float, Bounds(above=0, maximum=0.999)] = setting(
        "The fraction of requests that should meet each target.", 0.95
    )


def _low_to_high(_instance: Any, field: Attribute[Any], bounds: tuple[int, ...]) -> None:
    expected = 2
    if len(bounds) != expected or bounds[0] > bounds[1]:
        shown = ", ".join(map(str, bounds))
        raise ValueError(
            f"{field.name}: expected the fewest and the most workers, such as [1, 8], got [{shown}]"
        )


@frozen(kw_only=True)
class PlannerBounds:
    """The fewest and the most workers of each role, as [FEWEST, MOST]."""

    both: tuple[NonNegativeInt, ...] = setting(
        "Workers of whole requests; by default [1, 64].", (1, 64), validator=_low_to_high
    )
    decode: tuple[NonNegativeInt, ...] = setting(
        "Workers of the role decode; by default [1, 64].", (1, 64), validator=_low_to_high
    )
    prefill: tuple[NonNegativeInt, ...] = setting(
        "Workers of the role prefill; by default [0, 64]. Without one, decode workers prefill.",
        (0, 64),
        validator=_low_to_high,
    )

    def of(self, role: Role) -> tuple[int, int]:
        """The fewest and the most workers of a role."""
        fewest, most = getattr(self, role.value)
        return fewest, most


@frozen(kw_only=True)
class PlannerBudget:
    """What a plan may cost."""

    workers: PositiveInt | None = setting(
        "The most workers of all roles together; unlimited by default.", None
    )


@frozen(kw_only=True)
class TuningConfig:
    """How options of routing and disaggregation policies are tuned while requests are served.

    Each tuning plugin adds its own. Only options that their plugin declares as tunable are tuned,
    within the declared range.
    """

    kind: str = setting("The tuning plugin.", "trials")
    mode: Literal["off", "advise", "act"] = setting(
        "off; advise: only tell which value is found better; act: use it if it proves better.",
        "off",
    )

    def problems(self, config: Any) -> Iterable[str]:
        """Why nothing can be tuned in the deployment of this configuration, and what to do.

        Each as "what is wrong", or as ".OPTION: what is wrong" where an option is to blame.
        """
        return ()


@frozen(kw_only=True)
class PlannerConfig:
    """Options of every planner; each planner plugin adds its own."""

    kind: str = setting("The planner plugin.")
    mode: Literal["act", "advise"] = setting(
        "act: start and stop workers; advise: only tell what would be done. A replay always acts.",
        "act",
    )
    targets: PlannerTargets = setting("The latencies to reach.", factory=PlannerTargets)
    bounds: PlannerBounds = setting("Workers of each role.", factory=PlannerBounds)
    budget: PlannerBudget = setting("What a plan may cost.", factory=PlannerBudget)
    interval_s: PositiveSeconds = setting("Seconds between two plans.", 5.0)
    start_up_s: PositiveSeconds = setting(
        "Seconds from the launch of a worker until it is ready. Replayed workers start in this "
        "time; the planner assumes it until it has seen workers start.",
        120.0,
    )
    tuning: TuningConfig | None = setting(
        "Tries other values of tunable options on some requests; off by default. The kind `trials` "
        "comes with commutator-tuning.",
        None,
    )

    def problems(self, context: PlannerContext) -> Iterable[str]:
        """Why this planner cannot plan such a fleet, as "OPTION: what is wrong, and what to do"."""
        return ()

    def meter(self, others: Callable[[str], int]) -> SpeedMeter | None:
        """What measures for this planner, in each front door, how fast the workers of a role are.

        ``others``: requests in flight at a worker from other front doors. None: nothing does.
        """
        return None


# --------------------------------------------------------------------- observation


@frozen(kw_only=True)
class EnginePerformance:
    """How fast one worker is.

    A forward step takes ``step_s + step_request_s * n`` with n decoding requests, and
    ``1 / prefill_tokens_per_s`` more for each prompt token that it computes.
    """

    prefill_tokens_per_s: float
    """Prompt tokens computed a second, above 0."""
    step_s: float
    """Seconds of a step with decoding requests, beside their own; 0 or more."""
    step_request_s: float
    """Seconds that each decoding request adds to a step; 0 or more."""
    max_running: int
    """Requests in one batch, at least 1."""
    max_step_tokens: int
    """Tokens computed in one step, prompts in chunks and decoding requests together."""
    kv_tokens: int
    """Tokens that the KV memory holds."""

    def work_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Seconds of a full worker that a request costs: its prompt and its part of steps."""
        return prompt_tokens / self.prefill_tokens_per_s + output_tokens * self.step_request_s


@frozen(kw_only=True)
class Arrivals:
    """Requests that arrived for a role in a window.

    They count on arrival, whatever became of them, so that a fleet that is too small cannot hide
    its demand.
    """

    requests: int = 0
    """Their number."""
    prompt_tokens: int = 0
    """Prompt tokens of all that no cache is expected to hold, and that this role computes."""
    context_tokens: int = 0
    """Prompt tokens of all, wherever they are computed: what KV memory has to hold."""
    prompt_lengths: Mapping[int, int] = field(factory=dict)
    """Number of requests by ``length_bucket`` of these tokens."""
    gaps_squared_s2: float = 0.0
    """Sum of the squared seconds between each request and the one before it."""


@frozen(kw_only=True)
class SampleSums:
    """Sums over stretches of time at workers, of what was computed in them: how fast a worker is.

    Each stretch counts in parts of its own time, so that relative errors count alike.
    """

    count: float = 0.0
    """Number of stretches."""
    terms: tuple[float, ...] = (0.0,) * 4
    """Of forward steps, requests in steps, prompt tokens and first tokens, a second each."""
    products: tuple[float, ...] = (0.0,) * 10
    """Of the products of these: each with itself and those after it, in this order."""

    def __add__(self, other: SampleSums) -> SampleSums:
        return SampleSums(
            count=self.count + other.count,
            terms=tuple(map(add, self.terms, other.terms)),
            products=tuple(map(add, self.products, other.products)),
        )

    def times(self, factor: float) -> SampleSums:
        """The same as if each stretch had counted ``factor`` times."""
        return SampleSums(
            count=self.count * factor,
            terms=tuple(one * factor for one in self.terms),
            products=tuple(one * factor for one in self.products),
        )


class SpeedMeter(ABC):
    """Measures in one front door how fast the workers of a role are.

    Times are seconds of one clock, and do not go back at a worker.
    """

    @property
    @abstractmethod
    def sums(self) -> Mapping[int, SampleSums]:
        """Everything measured since the front door began, by kind of stretch."""

    @abstractmethod
    def began(
        self, key: Hashable, worker_id: str, now_s: float, *, prompt_tokens: int, ahead_tokens: int
    ) -> None:
        """A worker has got a request, of which it computes ``prompt_tokens``.

        It has ``ahead_tokens`` to compute before. A request that begins again is another one.
        """

    @abstractmethod
    def answered(self, key: Hashable, worker_id: str, now_s: float) -> None:
        """The first token of a request has come from a worker."""

    @abstractmethod
    def ended(self, key: Hashable, worker_id: str, tokens: int, now_s: float) -> None:
        """The last of ``tokens`` tokens of a request has come from a worker."""

    @abstractmethod
    def lost(self, key: Hashable, now_s: float) -> None:
        """A request has left its worker without a whole answer."""

    @abstractmethod
    def prefilled(self, seconds: float, prompt_tokens: int) -> None:
        """A worker has computed prompts of so many tokens in ``seconds``, which are above 0."""


class WorkerPhase(StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"
    """Launched, or about to change its role, and not ready."""
    READY = "ready"
    """Gets requests."""
    DRAINING = "draining"
    """Gets no more requests; it exits after its last one."""


@frozen(kw_only=True)
class PlannedWorker:
    """One worker as a planner sees it."""

    worker_id: str
    """Unique in the fleet."""
    role: Role
    """What it is used for."""
    phase: WorkerPhase
    """Where it is in its life."""
    age_s: float
    """Seconds since its launch; 0 while it changes its role."""
    active_requests: int = 0
    """Requests in flight at it."""
    active_prefill_tokens: int = 0
    """Prompt tokens that it has still to compute."""
    cached_blocks: int = 0
    """KV blocks that it caches."""
    may_become: Collection[Role] = ()
    """The roles that it could be given instead of its own."""
    held: bool = False
    """Whether people, or another deployment, decide about it: a plan counts it, and leaves it as it
    is."""


@frozen(kw_only=True)
class Observation:
    """What is known at one time. What is not known is None, never 0."""

    time_s: float
    """Seconds on any clock that does not go back."""
    window_s: float
    """Seconds since the last observation that knew the arrivals; 0 in the first one."""
    arrivals: Mapping[Role, Arrivals] | None
    """What arrived in the window, by role."""
    workers: Sequence[PlannedWorker] | None
    """Every worker that has been launched and has not exited."""
    output_tokens: float | None = None
    """Mean tokens of the answers that ended in the window."""
    started_s: Sequence[float] = ()
    """The start-up times of the workers that became ready in the window, in seconds."""
    given_up: Mapping[Role, int] = field(factory=dict)
    """Launches that were given up after the observation before, because they took too long."""
    waiting_tokens: Mapping[Role, int] = field(factory=dict)
    """Prompt tokens of requests that wait for a worker of a role."""
    waiting_requests: int | None = None
    """Requests that wait for a worker."""
    oldest_wait_s: float | None = None
    """Seconds that the longest-waiting request has waited; None: none waits, or it is unknown."""
    attained_ttft: float | None = None
    """Fraction of the first tokens of the window that came within the target."""
    attained_itl: float | None = None
    """Fraction of the answers that ended in the window with a mean time between tokens within the
    target."""
    measured: Mapping[Role, Mapping[int, SampleSums]] = field(factory=dict)
    """What the requests that ended in the window tell of how fast a worker of a role is, by kind of
    stretch."""


# ------------------------------------------------------------------------ decisions


@frozen(kw_only=True)
class PlannerContext:
    """What a planner knows about its fleet."""

    performance: Mapping[Role, EnginePerformance | None]
    """How fast a worker of each role is, as its engine tells; None where it does not. The roles are
    those that the fleet may have, and that are to be planned."""
    fingerprints: Mapping[Role, str] = field(factory=dict)
    """What the speed of a worker of each role depends on (model and options of the engine), as a
    hash. Empty in a replay, where nothing is to be read or kept."""


@frozen(kw_only=True)
class Proposal:
    """The number of workers that a role should have."""

    workers: int
    """0 or more; bounds and budget are applied to it."""
    reason: str
    """Why, in one line, for people."""
    needed: int | None = field(default=Factory(lambda self: self.workers, takes_self=True))
    """What the demand needs now, where that is not ``workers``; None where it is not known."""
    samples: int = 0
    """The number of measured stretches of time that how fast a worker is rests on, beside what its
    engine tells."""
    residual: float | None = None
    """How far measured times are from what that speed explains: 0.1 is 10 %. None: none is
    known."""


@frozen(kw_only=True)
class Sizing:
    """What a planner wants after an observation."""

    roles: Mapping[Role, Proposal]
    """By role, for each role of the fleet."""
    warnings: Sequence[str] = ()
    """What went wrong, and what no number of workers can help; a line each."""
    start_up_s: float | None = None
    """Seconds in which most workers become ready: a launch that takes three times as long is given
    up. None: `start_up_s` of the options."""


class PlannerPolicy(ABC, Generic[StateT]):
    """Says how many workers each role should have, from what was observed.

    Its state goes in and out and is never changed in place, so that a replay plans as a deployment
    does. It is asked at each interval and must not block. The fleet follows at once: a policy that
    shrinks it must do so slowly enough that it does not flap.
    """

    @abstractmethod
    def begin(self) -> StateT:
        """The state before the first observation."""

    @abstractmethod
    def propose(self, state: StateT, seen: Observation) -> tuple[StateT, Sizing]:
        """The next state, and what to have from now on.

        ``seen`` is later than the observation before. Where this raises, the last plan stays.
        """

    def keep(self, state: StateT) -> None:
        """Write down what the next start should know. Default: nothing.

        Called now and then in a thread of its own, and at the end.
        """

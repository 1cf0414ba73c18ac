"""Planners: how many workers of each role a deployment needs. Nothing here does I/O."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from operator import add
from typing import Annotated, Any, Generic, Literal, TypeVar

from attrs import Attribute, field, frozen

from commutator.contract.settings import (
    Bounds,
    NonNegativeInt,
    PositiveInt,
    PositiveSeconds,
    Seconds,
    setting,
)
from commutator.contract.worker import Role

__all__ = [
    "ActionKind",
    "Arrivals",
    "ConstraintConfig",
    "Demand",
    "EnginePerformance",
    "Forecaster",
    "ForecasterConfig",
    "Limit",
    "Observation",
    "PerformanceConfig",
    "Plan",
    "PlanAction",
    "PlanConstraint",
    "PlannedWorker",
    "PlannerBounds",
    "PlannerBudget",
    "PlannerConfig",
    "PlannerPolicy",
    "PlannerTargets",
    "Proposal",
    "RolePlan",
    "SampleSums",
    "Situation",
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
class ForecasterConfig:
    """Options of every forecaster; each forecaster plugin adds its own."""

    kind: str = setting("The forecaster plugin.")


@frozen(kw_only=True)
class ConstraintConfig:
    """Options of every constraint; each constraint plugin adds its own."""

    kind: str = setting("The constraint plugin.")


@frozen(kw_only=True)
class PerformanceConfig:
    """How fast one worker is, for engines that do not tell.

    A forward step takes ``step_s + step_request_s * n`` with n decoding requests, and
    ``1 / prefill_tokens_per_s`` more for each prompt token that it computes.
    """

    prefill_tokens_per_s: Annotated[float, Bounds(above=0)] = setting(
        "Prompt tokens computed a second."
    )
    step_s: PositiveSeconds = setting("Time between the tokens of an answer that decodes alone.")
    step_request_s: Seconds = setting(
        "How much longer that time is for each further request that decodes.", 0.0
    )
    max_running: PositiveInt = setting("Requests in one batch.", 256)
    max_step_tokens: PositiveInt = setting(
        "Tokens computed in one step, decodes and prefill chunks together.", 2048
    )
    kv_tokens: PositiveInt = setting("Tokens that the KV memory holds.", 262_144)

    def performance(self) -> EnginePerformance:
        """The same, as plans are told."""
        return EnginePerformance(
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            step_s=self.step_s,
            step_request_s=self.step_request_s,
            max_running=self.max_running,
            max_step_tokens=self.max_step_tokens,
            kv_tokens=self.kv_tokens,
        )


@frozen(kw_only=True)
class TuningConfig:
    """How options of routing and disaggregation policies are tuned while requests are served.

    Only options that their plugin declares as tunable are, within the declared range.
    """

    mode: Literal["off", "advise", "act"] = setting(
        "off; advise: only tell which value a replay finds better; act: try it on requests, and "
        "use it if it proves better.",
        "off",
    )
    state_file: str | None = setting(
        "Where tuned values are kept, for the next start. Without it the values of the "
        "configuration come back with a restart.",
        None,
    )
    window_s: PositiveSeconds = setting(
        "Values are tried in replays of the requests of this many seconds.", 3600.0
    )
    max_requests: PositiveInt = setting(
        "Of these requests, at most this many, the latest: a search replays them some ten times "
        "for each tunable option.",
        5_000,
    )
    min_gain: Annotated[float, Bounds(minimum=0, maximum=1)] = setting(
        "A value is tried on requests if replayed ones are delayed less by more than this part.",
        0.05,
    )
    share: Annotated[float, Bounds(above=0, maximum=0.5)] = setting(
        "The part of the requests that a value is tried on.", 0.1
    )
    min_requests: PositiveInt = setting(
        "Both stages of a trial take at least this many requests with each of the two values.",
        200,
    )
    canary_s: PositiveSeconds = setting(
        "A value is tried on `share` of the requests for this many seconds. Then, twelve times for "
        "half as long, all requests have it or none. Half of it should be much longer than a "
        "request takes. What lacks requests for six times as long is given up.",
        300.0,
    )
    pause_s: PositiveSeconds = setting(
        "Seconds from the end of a trial, or of a search that found nothing, to the next search.",
        1800.0,
    )
    search_timeout_s: PositiveSeconds = setting(
        "A search that takes longer is ended without a result. It runs as a process of lowest "
        "priority.",
        600.0,
    )


@frozen(kw_only=True)
class PlannerConfig:
    """Options of every planner; each planner plugin adds its own."""

    kind: str = setting("The planner plugin.")
    mode: Literal["act", "advise"] = setting(
        "act: start and stop workers; advise: only tell what would be done. A replay always acts.",
        "act",
    )
    performance: PerformanceConfig | None = setting(
        "How fast one worker is; required for engines that do not tell by their options, as `sim` "
        "does. It takes the place of what they tell.",
        None,
    )
    learn: bool = setting(
        "Correct how fast a worker is by how long its tokens take. The fleet does not shrink while "
        "measured times are more than 30 % from that.",
        True,
    )
    learned_file: str | None = setting(
        "The file that keeps what was learned of workers' speed for the next start, which uses it "
        "for the same model, engine and machine; by default nothing is kept.",
        None,
    )
    adapt: bool = setting(
        "Size the fleet for less of the growth that is forecast while more requests meet the "
        "targets than `targets.attainment` asks, and for more where too few do. The fleet then "
        "changes now and then at constant load, too.",
        False,
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
    hold_s: Seconds = setting(
        "The fleet shrinks to the largest need of this many seconds, or of the start-up time if "
        "that is longer.",
        180.0,
    )
    max_flips_per_hour: NonNegativeInt = setting(
        "Changes of direction, from growing to shrinking or back, in an hour. The fleet shrinks "
        "only if it could grow again within this number.",
        6,
    )
    idle_penalty_s: Seconds = setting(
        "A role whose bounds begin at 0 is stopped after the start-up time plus this many seconds "
        "without requests.",
        300.0,
    )
    forecaster: ForecasterConfig | None = setting(
        "How much demand may grow until a worker started now is ready; by default not at all. The "
        "planner `slo` has the kind `growth` by default; null turns it off.",
        None,
    )
    constraints: tuple[ConstraintConfig, ...] = setting(
        "Further floors and ceilings, applied in this order, before bounds and budget.", ()
    )
    tuning: TuningConfig = setting(
        "Tries other values of tunable options on some requests; off by default. Needs "
        "the observer `recording`, and commutator-replay installed.",
        factory=TuningConfig,
    )


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
class Proposal:
    """The number of workers that a role needs."""

    workers: int
    """0 or more; bounds, budget and holds come later."""
    reason: str
    """Why, in one line, for people."""
    warning: str | None = None
    """What no number of workers can help, such as a target below the time of one prompt."""


class PlannerPolicy(ABC):
    """Says how many workers the demand needs, from the situation alone.

    The same number must answer "may the fleet shrink?" and "must it grow?", so that it does not
    flap: the holds that make shrinking slow are not the policy's.
    """

    @abstractmethod
    def propose(self, situation: Situation) -> Mapping[Role, Proposal]:
        """A proposal for each role in ``situation.demands``."""


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


class ActionKind(StrEnum):
    """What is done to a fleet, cheapest first."""

    UNDRAIN = "undrain"
    """Give a draining worker requests again."""
    CANCEL = "cancel"
    """End a worker that is not ready yet; one that is about to change its role keeps it."""
    SET_ROLE = "set_role"
    """Give a worker another role once it has no requests."""
    LAUNCH = "launch"
    """Start a worker."""
    DRAIN = "drain"
    """Give a worker no more requests and end it after the last one."""


@frozen(kw_only=True)
class PlanAction:
    """One step from the fleet as it is to the plan."""

    kind: ActionKind
    """What to do."""
    role: Role
    """The role of the worker; the new one if it changes."""
    worker_id: str | None
    """The worker; None for a launch."""


@frozen(kw_only=True)
class RolePlan:
    """The plan for one role, with what led to it."""

    desired: int
    """Workers that should be ready."""
    proposed: int | None
    """What the policy proposed; None where the last plan was kept."""
    ready: int
    """Workers that get requests."""
    starting: int
    """Workers that are expected to become ready."""
    draining: int
    """Workers that still answer their last requests."""
    reason: str
    """Why, in one line, for people: the policy's reason, then each limit and hold."""
    samples: int = 0
    """The number of measured stretches of time that how fast a worker is rests on, beside what its
    engine tells."""
    residual: float | None = None
    """How far measured times are from what that speed explains: 0.1 is 10 %. None: none is
    known."""


@frozen(kw_only=True)
class Plan:
    """One decision."""

    time_s: float
    """The time of its observation."""
    roles: Mapping[Role, RolePlan]
    """By role."""
    actions: Sequence[PlanAction] = ()
    """What to do now."""
    warnings: Sequence[str] = ()
    """What went wrong, and what no plan can help."""

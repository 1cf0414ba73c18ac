"""From observations to how many workers there should be: observe, forecast, ask, constrain, hold.

Pure: state goes in and out, and time comes with the observation.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from attrs import evolve, field, frozen

from commutator.contract.planner import (
    Arrivals,
    EnginePerformance,
    Observation,
    PlannerPolicy,
    Proposal,
    SampleSums,
    Sizing,
    WorkerPhase,
    length_bucket,
)
from commutator.contract.worker import Role
from commutator.planning import supply, within
from commutator_slo.config import SloConfig
from commutator_slo.growth import Growth, GrowthState
from commutator_slo.learned import LearnedSpeed
from commutator_slo.need import Demand, Need, NeedOf, Situation
from commutator_slo.need import needs as queueing_needs
from commutator_slo.outliers import FAR, Outliers
from commutator_slo.returns import Returns, spared

_LEVEL_S = 60.0
"""Demand is averaged over this time."""
_SHAPE_S = 3600.0
"""Older lengths of prompts and answers, and gaps, count by this exponential time constant."""
_FORGOTTEN = 1e-6
"""A weight that counts no more."""
_FEWEST_GAPS = 20
"""Below this number of arrivals, gaps are taken for those of a Poisson process."""
_MOST_VARIATION = 20.0
_START_UPS = 32
"""Start-up times that are remembered."""
_START_UP_QUANTILE = 0.9
_PATIENCE = 1.5
"""After a launch that was given up, start-ups are taken to need this many times as long. Not as
long as it took to give up: a launcher that hangs once with several launches would stop all for
hours."""
_CAUTION = 4.0
"""To shrink, demand counts with this many standard deviations of its number of arrivals more."""
_RESERVE_PER_MINUTE = 1 / 30
"""What a minute without misses takes from the reserve: from whole to none in half an hour. A minute
with as many misses as are allowed leaves it, and one with more adds in proportion."""
_REACTS_S = 90.0
"""Where a worker needs longer to become ready, the reserve moves as much more slowly: what a change
did is known only then."""
_LEAST_RESERVE, _MOST_RESERVE = -1.0, 2.0
_BELOW = 0.3
"""With the least reserve the fleet is sized for about this part less than the demand there is."""
_MOST_WEIGHT = 4.0
_MISSES_S = 300.0
_BACK = 0.5
"""Where too many miss with less than no reserve, it stays this far above for hours."""
_FLOOR_S = 43_200.0
"""In which such a floor sinks by 1."""
_MOST_RESIDUAL = 0.3
"""Nothing shrinks on a speed that measured times are further from."""
_HOUR_S = 3600.0
_FLIPS_BACK = 2
"""Shrinking may cost two changes of direction: this one, and the one of growing again."""


@frozen
class _Window:
    time_s: float
    span_s: float
    requests: int
    prompt_tokens: float
    """Without what of a rare prompt is too long for the target."""
    answer_tokens: float

    def work_s(self, performance: EnginePerformance) -> float:
        return performance.work_s(self.prompt_tokens, self.answer_tokens)


@frozen(kw_only=True)
class RoleState:
    """What is remembered of one role."""

    speed: LearnedSpeed
    """How fast a worker is."""
    forecast: GrowthState = GrowthState()
    windows: tuple[_Window, ...] = ()
    """Those of the last minute."""
    lengths: Mapping[int, float] = field(factory=dict)
    outliers: Outliers = Outliers()
    """Prompts that no number of workers computes near the target."""
    context_tokens: float = 0.0
    """Of ``gaps`` prompts together."""
    gaps: float = 0.0
    gaps_s: float = 0.0
    gaps_squared_s2: float = 0.0
    needs: tuple[tuple[float, int], ...] = ()
    """Cautious needs with their times, each followed by smaller ones only."""
    returns: Returns = Returns()
    """When demand fell, and came back."""
    desired: int | None = None
    """Of the last plan."""
    active_s: float | None = None
    """When there was last a request."""
    growing: bool | None = None
    """The direction of the last change; None before the first one."""
    flips: tuple[float, ...] = ()
    """The times of the changes of direction of the last hour."""


@frozen(kw_only=True)
class PipelineState:
    """Everything that a planner remembers; never changed in place."""

    roles: Mapping[Role, RoleState]
    begun_s: float | None = None
    """The time of the first observation."""
    output_tokens: float = 0.0
    """Mean of an answer."""
    output_seen_s: float = 0.0
    """Seconds of answers that it rests on."""
    start_ups: tuple[float, ...] = ()
    """The latest start-up times, in seconds."""
    reserve: float = 1.0
    """The part of forecast growth, and of caution, that the fleet is sized for. It is learned: less
    while more requests meet the targets than asked, more at once where too few do. Below 0 the
    fleet is smaller than the formulas say: requests met the targets better than these expect."""
    floor: float = _LEAST_RESERVE
    """What the reserve does not go below, after it had been too little."""
    missed: float = 0.0
    """The part of the requests that missed a target of late."""
    spare: float | None = None
    """The requests that may still miss the targets, by how many did of late; None: not known."""


class Pipeline(PlannerPolicy[PipelineState]):
    """What is needed by queueing and forecast, under the options of `slo`."""

    def __init__(
        self,
        config: SloConfig,
        performance: Mapping[Role, EnginePerformance],
        *,
        needs: NeedOf | None = None,
        growth: Growth | None = None,
    ) -> None:
        """``performance``: of a worker of each role that the fleet may have.

        ``needs``: instead of queueing formulas. Without ``growth`` demand is taken to stay.
        """
        self._config = config
        self._performance = performance
        self._needs = needs or partial(queueing_needs, headroom=config.headroom)
        self._growth = growth

    def begin(
        self, learned: Mapping[Role, Mapping[int, SampleSums]] | None = None
    ) -> PipelineState:
        """The state before the first observation.

        ``learned``: what an earlier state's ``speed.buckets`` were, by role.
        """
        speeds = {
            role: LearnedSpeed(told=told, buckets=(learned or {}).get(role, {})).fitted(None)
            for role, told in self._performance.items()
        }
        return PipelineState(roles={role: RoleState(speed=speed) for role, speed in speeds.items()})

    def propose(self, state: PipelineState, seen: Observation) -> tuple[PipelineState, Sizing]:
        """Where arrivals or workers are not known, or the policy fails, the last plan stays."""
        if seen.given_up:
            # The next launch may take longer: else a slow start would be given up for ever.
            late = sum(seen.given_up.values())
            state = _remember_start_ups(state, [_PATIENCE * self._start_up_s(state)] * late)
        state = self._learn(state, seen)
        start_up_s = self._start_up_s(state)
        situation = self._situation(state, seen, start_up_s)
        warnings: list[str] = []
        needed, cautious = self._needed(state, seen, situation, warnings)
        notes: dict[Role, list[str]] = {role: [] for role in self._performance}
        if state.reserve != 1:
            for lines in notes.values():
                lines.append(f"reserve {state.reserve:.0%}")
        if needed:
            needs = self._limited(needed, notes)
            cautious_needs = self._limited(cautious, defaultdict(list))
            desired: dict[Role, int] = {}
            roles = dict(state.roles)
            for role, notes_of_role in notes.items():
                roles[role], desired[role] = self._hold(
                    state, role, needs[role], cautious_needs[role], seen.time_s, start_up_s,
                    situation, notes_of_role,
                )  # fmt: skip
            state = evolve(state, roles=roles)
        else:
            desired = {
                role: situation.supply[role] if one.desired is None else one.desired
                for role, one in state.roles.items()
            }
            for lines in notes.values():
                lines.append("as before")
        in_use = [role for role in state.roles if self._in_use(state, role, seen.time_s)]
        desired = within(self._config, desired, notes, in_use)
        state = evolve(
            state,
            roles={role: evolve(one, desired=desired[role]) for role, one in state.roles.items()},
        )
        sized = {
            role: self._sized(state, role, needed.get(role), notes[role])
            for role in self._performance
        }
        return state, Sizing(roles=sized, warnings=warnings, start_up_s=start_up_s)

    # ------------------------------------------------------------------ observe

    def _learn(self, state: PipelineState, seen: Observation) -> PipelineState:
        if seen.started_s:
            state = _remember_start_ups(state, seen.started_s)
        output_tokens, output_seen_s = state.output_tokens, state.output_seen_s
        if seen.output_tokens is not None:
            window_s = seen.window_s or self._config.interval_s
            output_seen_s = output_seen_s * math.exp(-window_s / _SHAPE_S) + window_s
            output_tokens += (seen.output_tokens - output_tokens) * window_s / output_seen_s
        state = evolve(
            state,
            output_tokens=output_tokens,
            output_seen_s=output_seen_s,
            begun_s=seen.time_s if state.begun_s is None else state.begun_s,
        )
        if seen.arrivals is None:
            return state
        state = self._adapted(state, seen)
        arrivals = seen.arrivals
        roles = {
            role: self._learn_role(state, role, arrivals.get(role, Arrivals()), seen)
            for role in state.roles
        }
        return evolve(state, roles=roles)

    def _adapted(self, state: PipelineState, seen: Observation) -> PipelineState:
        """The state with the reserve after a window, by what was attained and what is asked.

        Each miss adds as much as the hits that are asked for each allowed miss take away, so that
        in the long run as many meet the targets as asked, wherever that is within the bounds.
        """
        attained = [one for one in (seen.attained_ttft, seen.attained_itl) if one is not None]
        missed = min(1.0, sum(1 - one for one in attained))
        allowed = 1 - self._config.targets.attainment
        requests = max((one.requests for one in (seen.arrivals or {}).values()), default=0)
        known = missed if attained else None
        spare = spared(state.spare, requests, known, allowed, seen.window_s)
        state = evolve(state, spare=spare)
        if not self._config.adapt or not attained or not seen.arrivals:
            return state
        weight_s = seen.window_s * self._weight(state, seen)
        of_late = state.missed + (missed - state.missed) * min(1.0, weight_s / _MISSES_S)
        floor = max(_LEAST_RESERVE, state.floor - seen.window_s / _FLOOR_S)
        if of_late > allowed and state.reserve < 0:
            floor = max(floor, min(0.0, state.reserve + _BACK))
        pace = _RESERVE_PER_MINUTE * min(1.0, _REACTS_S / self._lead_s(state))
        step = pace * weight_s / 60 * (missed / allowed - 1)
        reserve = min(max(floor, state.reserve + step), _MOST_RESERVE)
        return evolve(state, reserve=reserve, floor=floor, missed=of_late)

    def _weight(self, state: PipelineState, seen: Observation) -> float:
        """The requests of the window, by how many there usually are."""
        requests = max((one.requests for one in (seen.arrivals or {}).values()), default=0)
        usual = max((one.gaps / one.gaps_s for one in state.roles.values() if one.gaps), default=0)
        expected = usual * seen.window_s
        return min(_MOST_WEIGHT, requests / expected) if expected else 1.0

    def _learn_role(
        self, state: PipelineState, role: Role, arrived: Arrivals, seen: Observation
    ) -> RoleState:
        one = state.roles[role]
        busy = any(w.active_requests for w in seen.workers or () if w.role == role)
        if busy or seen.waiting_tokens.get(role) or arrived.requests:
            one = evolve(one, active_s=seen.time_s)
        if seen.window_s <= 0:
            return one
        answers = 0.0 if role is Role.PREFILL else state.output_tokens * arrived.requests
        speed = one.speed
        if self._config.learn:
            measured = seen.measured.get(role, {})
            speed = speed.learn(measured, seen.time_s, seen.window_s)
        longest = self._longest(speed.performance)
        outliers = one.outliers.after(
            seen.time_s, arrived.prompt_lengths, arrived.prompt_tokens, longest
        )
        prompt_tokens = arrived.prompt_tokens - outliers.excess(longest)
        oldest_s = seen.time_s - _LEVEL_S - 1e-3
        windows = (
            *(window for window in one.windows if window.time_s - window.span_s >= oldest_s),
            _Window(seen.time_s, seen.window_s, arrived.requests, prompt_tokens, answers),
        )
        forecast, span_s = one.forecast, sum(window.span_s for window in windows)
        # The level of less time varies too much by chance.
        if self._growth is not None and span_s >= _LEVEL_S / 2:
            level = self._work(windows, span_s, outliers, speed.performance)
            forecast = self._growth.update(forecast, seen.time_s, level, self._lead_s(state))
        kept = math.exp(-seen.window_s / _SHAPE_S)
        lengths = {
            tokens: weight * kept for tokens, weight in one.lengths.items() if weight > _FORGOTTEN
        }
        for tokens, number in arrived.prompt_lengths.items():
            lengths[tokens] = lengths.get(tokens, 0.0) + number
        return evolve(
            one,
            speed=speed,
            windows=windows,
            outliers=outliers,
            lengths=dict(sorted(lengths.items())),
            context_tokens=one.context_tokens * kept + arrived.context_tokens,
            gaps=one.gaps * kept + arrived.requests,
            gaps_s=one.gaps_s * kept + seen.window_s,
            gaps_squared_s2=one.gaps_squared_s2 * kept + arrived.gaps_squared_s2,
            forecast=forecast,
        )

    def _work(
        self,
        windows: Sequence[_Window],
        span_s: float,
        outliers: Outliers,
        performance: EnginePerformance,
    ) -> float:
        """Seconds of a worker's work that came in a second, with the share of rare prompts."""
        excess = outliers.excess_per_s(self._longest(performance))
        usual = sum(window.work_s(performance) for window in windows) / span_s
        return usual + performance.work_s(excess, 0.0)

    def _longest(self, performance: EnginePerformance) -> float:
        """Tokens of the longest prompt that a worker computes within the target."""
        return self._config.targets.ttft_s * performance.prefill_tokens_per_s

    def _start_up_s(self, state: PipelineState) -> float:
        """The time in which most workers become ready."""
        if not state.start_ups:
            return self._config.start_up_s
        ordered = sorted(state.start_ups)
        return ordered[min(len(ordered) - 1, int(_START_UP_QUANTILE * len(ordered)))]

    def _lead_s(self, state: PipelineState) -> float:
        """Until a worker is ready that the next plan starts."""
        return self._start_up_s(state) + self._config.interval_s

    # ----------------------------------------------------------------- forecast

    def _situation(self, state: PipelineState, seen: Observation, start_up_s: float) -> Situation:
        workers = seen.workers or ()
        backlog: Counter[Role] = Counter(seen.waiting_tokens)
        for worker in workers:
            if worker.phase is not WorkerPhase.DRAINING:
                backlog[worker.role] += worker.active_prefill_tokens
        lead_s = self._lead_s(state)
        demands = {}
        for role, one in state.roles.items():
            growth = 1.0 if self._growth is None else self._growth.growth(one.forecast)
            speed = one.speed.performance
            demands[role] = Demand(
                requests_per_s=self._rate_per_s(role, one, state.output_tokens),
                prompt_lengths=self._usual_lengths(one),
                context_tokens=one.context_tokens / one.gaps if one.gaps else 0.0,
                output_tokens=0.0 if role is Role.PREFILL else state.output_tokens,
                gap_variation=_gap_variation(one),
                growth=self._reserved(state, growth),
                backlog_tokens=one.outliers.backlog(
                    backlog[role], seen.time_s, speed.prefill_tokens_per_s, lead_s
                ),
            )
        return Situation(
            targets=self._config.targets,
            lead_s=lead_s,
            demands=demands,
            performance={role: one.speed.performance for role, one in state.roles.items()},
            supply={role: len(supply(workers, role, start_up_s)) for role in self._performance},
        )

    def _needed(
        self, state: PipelineState, seen: Observation, situation: Situation, warnings: list[str]
    ) -> tuple[Mapping[Role, Need], Mapping[Role, Need]]:
        """What is needed, and what is needed cautiously; empty: the last plan stays."""
        if seen.arrivals is None or seen.workers is None:
            warnings.append("arrivals or workers are not known: the last plan stays")
            return {}, {}
        try:
            needed = self._needs(situation)
            cautious = self._needs(self._cautiously(state, situation))
            warnings += [one.warning for one in needed.values() if one.warning]
            warnings += self._outliers_of(state)
            return (
                {role: needed[role] for role in situation.demands},
                {role: cautious[role] for role in situation.demands},
            )
        except Exception as error:  # noqa: BLE001 - a policy's failure must not stop planning
            problem = f"{type(error).__name__}: {error}"
            warnings.append(f"the policy failed, the last plan stays: {problem}")
            return {}, {}

    def _reserved(self, state: PipelineState, growth: float) -> float:
        """The growth to size for."""
        if state.reserve < 0:
            return min(growth, 1.0) * math.exp(_BELOW * state.reserve)
        return growth**state.reserve if growth > 1 else growth

    def _outliers_of(self, state: PipelineState) -> Iterator[str]:
        """Warnings, of the plan after which such a prompt came only."""
        for role, one in state.roles.items():
            longest = self._longest(one.speed.performance)
            if one.outliers.excess(longest):
                yield (
                    f"{role}: ttft_s {self._config.targets.ttft_s:g} cannot be reached for prompts "
                    f"over {math.floor(longest):,} tokens, by any number of workers: one came, and "
                    "none is started for it"
                )

    def _usual_lengths(self, one: RoleState) -> Mapping[int, float]:
        """The lengths of prompts; rare outliers count as long as the target allows."""
        if not one.outliers.rare:
            return one.lengths
        longest = self._longest(one.speed.performance)
        lengths: dict[int, float] = {}
        for tokens, weight in one.lengths.items():
            counted = length_bucket(math.floor(longest)) if tokens > FAR * longest else tokens
            lengths[counted] = lengths.get(counted, 0.0) + weight
        return lengths

    def _rate_per_s(self, role: Role, one: RoleState, output_tokens: float) -> float:
        """The work of the last minute, in requests of the usual lengths."""
        span_s = sum(window.span_s for window in one.windows)
        requests = sum(window.requests for window in one.windows)
        if not requests:
            return 0.0
        answers = 0.0 if role is Role.PREFILL else output_tokens
        lengths = self._usual_lengths(one)
        total = sum(lengths.values())
        usual = sum(tokens * weight for tokens, weight in lengths.items())
        performance = one.speed.performance
        usual_s = performance.work_s(usual / total if total else 0.0, answers)
        if not usual_s:
            return requests / span_s
        return self._work(one.windows, span_s, one.outliers, performance) / usual_s

    def _cautiously(self, state: PipelineState, situation: Situation) -> Situation:
        """The same with as much more demand as the arrivals that were counted vary by chance."""
        demands = {}
        for role, demand in situation.demands.items():
            rests_on_s = _LEVEL_S
            if self._growth is not None:
                rests_on_s = self._growth.rests_on_s(state.roles[role].forecast)
            requests = demand.requests_per_s * rests_on_s
            factor = 1 + _CAUTION / math.sqrt(requests) if requests else 1.0
            factor **= max(0.0, state.reserve)
            demands[role] = evolve(demand, growth=demand.growth * factor)
        return evolve(situation, demands=demands)

    # ---------------------------------------------------------------- constrain

    def _limited(
        self, needed: Mapping[Role, Need], notes: Mapping[Role, list[str]]
    ) -> dict[Role, int]:
        """What is needed within constraints, bounds and budget."""
        counts = {role: max(0, one.workers) for role, one in needed.items()}
        if Role.PREFILL in counts and Role.DECODE in counts:
            decode = counts[Role.DECODE]
            for ratio in self._config.constraints:
                allowed = ratio.limited(counts[Role.PREFILL], decode)
                if allowed != counts[Role.PREFILL]:
                    notes[Role.PREFILL].append(f"{allowed} by the ratio to {decode} decode workers")
                    counts[Role.PREFILL] = allowed
        return within(self._config, counts, notes)

    def _in_use(self, state: PipelineState, role: Role, now_s: float) -> bool:
        """Whether a role that may have no workers keeps one, because requests came of late."""
        active_s = state.roles[role].active_s
        if active_s is None:
            return False
        return now_s - active_s < self._start_up_s(state) + self._config.idle_penalty_s

    # --------------------------------------------------------------------- hold

    def _hold(
        self,
        state: PipelineState,
        role: Role,
        need: int,
        cautious: int,
        now_s: float,
        start_up_s: float,
        situation: Situation,
        notes: list[str],
    ) -> tuple[RoleState, int]:
        """The workers of a role: at once as many as needed, fewer only after some time."""
        one = state.roles[role]
        window_s = max(self._config.hold_s, start_up_s)
        cautious = max(need, cautious)
        needs = [past for past in one.needs if past[0] > now_s - window_s]
        while needs and needs[-1][1] <= cautious:
            needs.pop()
        needs.append((now_s, cautious))
        one = evolve(
            one,
            needs=tuple(needs),
            flips=tuple(time_s for time_s in one.flips if time_s > now_s - _HOUR_S),
        )
        if not one.outliers.disturb(now_s, one.speed.performance.prefill_tokens_per_s):
            rate_per_s = situation.demands[role].requests_per_s
            returns = one.returns.after(
                now_s, need, rate_per_s, window_s, self._config.longest_hold_s
            )
            one = evolve(one, returns=returns)
        current = situation.supply[role] if one.desired is None else one.desired
        if need >= current:
            return _changed(one, current, need, now_s), need
        lowest = needs[0][1]
        why: str | None
        if state.begun_s is None or now_s - state.begun_s < window_s:
            why = f"less than {window_s:.0f} s of demand are known"
        elif lowest >= current:
            why = f"needed in the last {window_s:.0f} s"
        else:
            why = self._held(state, one, lowest, situation.lead_s)
        if why is not None:
            notes.append(f"held at {current}: {why}")
            return one, current
        if lowest > need:
            notes.append(f"{lowest} were needed in the last {window_s:.0f} s")
        return _changed(one, current, lowest, now_s), lowest

    def _held(self, state: PipelineState, one: RoleState, lowest: int, lead_s: float) -> str | None:
        """Why the role must not shrink to what was needed of late; None: it may."""
        residual = one.speed.residual
        if residual is not None and residual > _MOST_RESIDUAL:
            return f"measured times are {residual:.0%} from what is known of a worker's speed"
        if (why := one.returns.held(lowest, lead_s, state.spare)) is not None:
            return why
        if one.growing and len(one.flips) + _FLIPS_BACK > self._config.max_flips_per_hour:
            return f"{len(one.flips)} changes of direction in an hour"
        return None

    def _sized(
        self,
        state: PipelineState,
        role: Role,
        need: Need | None,
        notes: Sequence[str],
    ) -> Proposal:
        one = state.roles[role]
        assert one.desired is not None, "it was just set"
        reason = [] if need is None else [f"need {need.workers} ({need.reason})"]
        return Proposal(
            workers=one.desired,
            needed=None if need is None else need.workers,
            reason="; ".join([*reason, *dict.fromkeys(notes)]),
            samples=one.speed.samples,
            residual=one.speed.residual,
        )


def _gap_variation(one: RoleState) -> float:
    if one.gaps < _FEWEST_GAPS:
        return 1.0
    mean_s = one.gaps_s / one.gaps
    variation = one.gaps_squared_s2 / one.gaps / mean_s**2 - 1
    return min(max(0.0, variation), _MOST_VARIATION)


def _changed(one: RoleState, current: int, desired: int, now_s: float) -> RoleState:
    """``one`` after a change of its workers, with its direction."""
    if desired == current:
        return one
    growing = desired > current
    turned = one.growing is not None and one.growing is not growing
    return evolve(one, growing=growing, flips=(*one.flips, now_s) if turned else one.flips)


def _remember_start_ups(state: PipelineState, times_s: Sequence[float]) -> PipelineState:
    return evolve(state, start_ups=(*state.start_ups, *times_s)[-_START_UPS:])

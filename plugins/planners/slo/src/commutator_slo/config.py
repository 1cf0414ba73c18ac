"""The options of the planner `slo`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from attrs import Attribute, asdict, frozen

from commutator import Bounds, NonNegativeInt, PositiveInt, PositiveSeconds, Seconds, setting
from commutator.contract.planner import EnginePerformance, PlannerConfig, PlannerContext, SpeedMeter
from commutator_slo.growth import GrowthConfig
from commutator_slo.learned import StepMeter


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
        return EnginePerformance(**asdict(self))


_Ratio = Annotated[float, Bounds(minimum=0)]


def _above_the_least(config: RatioConfig, _field: Attribute[Any], most: float | None) -> None:
    if most is not None and most < config.least:
        raise ValueError(f"most: expected at least `least` ({config.least:g}), got {most:g}")


@frozen(kw_only=True)
class RatioConfig:
    """Options of the constraint `ratio`."""

    kind: Literal["ratio"] = setting("The constraint.", "ratio")
    least: _Ratio = setting("The fewest prefill workers for each decode worker.", 0.0)
    most: _Ratio | None = setting(
        "The most prefill workers for each decode worker; unlimited by default.",
        None,
        validator=_above_the_least,
    )

    def limited(self, prefill: int, decode: int) -> int:
        """``prefill`` workers within the limits beside so many decode workers."""
        prefill = max(prefill, math.ceil(decode * self.least - 1e-9))
        if self.most is not None:
            prefill = min(prefill, math.floor(decode * self.most + 1e-9))
        return prefill


@frozen(kw_only=True)
class SloConfig(PlannerConfig):
    """Options of the planner `slo`."""

    headroom: Annotated[float, Bounds(minimum=0)] = setting(
        "Size the fleet for this fraction more than the forecast demand.", 0.0
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
    hold_s: Seconds = setting(
        "The fleet shrinks to the largest need of this many seconds, or of the start-up time if "
        "that is longer.",
        180.0,
    )
    longest_hold_s: Seconds = setting(
        "The fleet shrinks by more than a third only to the largest need of this many seconds "
        "where demand came back from such pauses before, or where growing again would make more "
        "requests late than `targets.attainment` leaves. With at most `hold_s`, neither counts.",
        3600.0,
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
    forecaster: GrowthConfig | None = setting(
        "How much demand may grow until a worker started now is ready; null: not at all.",
        factory=GrowthConfig,
    )
    constraints: tuple[RatioConfig, ...] = setting(
        "Further floors and ceilings, applied in this order, before bounds and budget.", ()
    )

    def problems(self, context: PlannerContext) -> Iterable[str]:
        if self.performance is None:
            for role in sorted(role for role, told in context.performance.items() if told is None):
                yield (
                    f"performance: required, as the engine of the {role} workers does not tell how "
                    "fast one is; serve it without `planner`, and `commutator planner profile` "
                    "measures it"
                )

    def meter(self, others: Callable[[str], int]) -> SpeedMeter | None:
        return StepMeter(others) if self.learn else None

"""The constraint `ratio`: prefill workers in proportion to decode workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from attrs import Attribute, frozen

from commutator import Bounds, setting
from commutator.contract.worker import Role
from commutator_slo.situation import Limit, PlanConstraint, Situation

__all__ = ["Ratio", "RatioConfig"]

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


class Ratio(PlanConstraint):
    """Limits prefill workers by the decode workers that are wanted."""

    def __init__(self, config: RatioConfig) -> None:
        self._config = config

    def limits(self, wanted: Mapping[Role, int], situation: Situation) -> Mapping[Role, Limit]:
        if Role.PREFILL not in wanted or Role.DECODE not in wanted:
            return {}
        decode, most = wanted[Role.DECODE], self._config.most
        limit = Limit(
            floor=math.ceil(decode * self._config.least - 1e-9),
            ceiling=None if most is None else math.floor(decode * most + 1e-9),
            reason=f"the ratio to {decode} decode workers",
        )
        return {Role.PREFILL: limit}

"""The canaries of all aliases, each with its judge. Pure but for what it remembers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from commutator.config.model import Config
from commutator_rollout.judge import (
    Arm,
    Judging,
    Seen,
    Verdict,
    begin,
    counts_text,
    evidence,
    judge,
)
from commutator_rollout.observed import joined
from commutator_rollout.steps import Phase
from commutator_traffic.config import AliasConfig, CanaryConfig, TableConfig

JUDGE = "the judge of canaries"
"""Who changes weights, for people."""
_AGAIN_S = 30.0
"""After which weights that could not be changed are tried again."""


def aliases_of(config: Config) -> Mapping[str, AliasConfig]:
    """The aliases, where the traffic plugin is the table."""
    table = config.traffic
    return table.aliases if isinstance(table, TableConfig) else {}


def not_ready_yet(
    before: Mapping[str, AliasConfig], after: Mapping[str, AliasConfig], held: Collection[str]
) -> set[str]:
    """The aliases whose canary had no share before, or is held until it is ready."""

    def served(name: str, model: str) -> bool:
        return name in before and bool(before[name].models.get(model)) and name not in held

    return {
        name
        for name, alias in after.items()
        if (one := alias.judged) is not None and not served(name, one.model)
    }


@frozen(kw_only=True)
class Ran:
    """A worker, as the judge sees it."""

    worker_id: str
    model: str
    phase: Phase
    cause: str
    """Why it is not ready any more, where it failed."""


@define
class _Case:
    alias: AliasConfig
    canary: CanaryConfig
    state: Judging | None = None
    """None until the first look."""
    arms: dict[str, Arm] = field(factory=dict)
    """What ended since the last look, by model."""
    ready: frozenset[str] = frozenset()
    """Workers of the new version that were ready then."""
    verdict: Verdict | None = None
    waits_until_s: float = -math.inf
    """Not looked at before."""


class Court:
    """Judges every canary that has a share."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}

    @property
    def watched(self) -> list[str]:
        """The models whose requests front doors are to count."""
        cases = self._cases.values()
        return sorted({name for one in cases for name, w in one.alias.models.items() if w})

    def use(self, aliases: Mapping[str, AliasConfig]) -> bool:
        """Judge these from now on; returns whether ``watched`` has changed.

        A case goes on while its canary and options stay; it does not begin anew when weights move.
        """
        before = self.watched
        cases = {}
        for name, alias in aliases.items():
            if (canary := alias.judged) is None:
                continue
            known = self._cases.get(name)
            if known is None or known.canary != canary:
                known = _Case(alias, canary)
            known.alias = alias
            cases[name] = known
        self._cases = cases
        return self.watched != before

    def add(self, arms: Mapping[str, Arm]) -> None:
        """A front door told what has ended, by model."""
        for case in self._cases.values():
            for model, one in arms.items():
                if case.alias.models.get(model):
                    case.arms[model] = case.arms.get(model, Arm()) + one

    def look(
        self, workers: Sequence[Ran], *, serves: bool, now_s: float
    ) -> tuple[str, AliasConfig, Verdict] | None:
        """The first alias whose canary is decided, again and again until ``decided``.

        ``serves``: front doors send canaries their share.
        """
        for name, case in self._cases.items():
            model = case.canary.model
            if case.waits_until_s > now_s:
                continue
            mine = [one for one in workers if one.model == model]
            ready = frozenset(one.worker_id for one in mine if one.phase is Phase.READY)
            crashed = [
                one for one in mine if one.worker_id in case.ready and one.phase is Phase.STARTING
            ]
            crash = "; ".join(
                f"its worker {one.worker_id} failed: {one.cause or 'it is lost'}" for one in crashed
            )
            arms, case.arms = case.arms, {}
            seen = Seen(
                serves=serves and bool(ready),
                old=joined(
                    arms, [one for one, w in case.alias.models.items() if w and one != model]
                ),
                new=joined(arms, [model]),
                crash=crash,
            )
            state = begin(case.canary, now_s) if case.state is None else case.state
            case.state, verdict = judge(case.canary, state, seen, now_s)
            if not crash:  # a crash is told until something was decided
                case.ready = ready
            if verdict is not None:
                return name, case.alias, verdict
        return None

    def decided(self, name: str, verdict: Verdict, now_s: float) -> None:
        """What follows from a verdict was done, or cannot be done: it is not told again soon."""
        if (case := self._cases.get(name)) is not None:
            case.verdict = verdict
            case.waits_until_s = math.inf if verdict.good else now_s + _AGAIN_S

    def status(self, now_s: float) -> list[dict[str, Any]]:
        """A row for each canary, as plain data."""
        return [
            _row(name, case, case.state, now_s)
            for name, case in self._cases.items()
            if case.state is not None
        ]


def _row(name: str, case: _Case, state: Judging, now_s: float) -> dict[str, Any]:
    weights, since_s = case.alias.models, state.serves_since_s
    return {
        "alias": name,
        "model": case.canary.model,
        "share": weights[case.canary.model] / sum(weights.values()),
        "serves_for_s": None if since_s is None else now_s - since_s,
        "judge_for_s": case.canary.judge_for_s,
        "requests": counts_text(state),
        "evidence": evidence(state),
        "verdict": None if case.verdict is None else case.verdict.why,
    }

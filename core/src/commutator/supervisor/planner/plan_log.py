"""What plans were made and why: for people and for metrics, as plain data."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from attrs import asdict

from commutator.contract.planner import Observation, PlannerConfig
from commutator.contract.worker import Role
from commutator.planning import ActionKind, Plan
from commutator.supervisor.fleet import ActionResult

log = logging.getLogger(__name__)

_EXPLAINED = 2000
"""Plans that are remembered in full."""
_HISTORY = 1000
"""Changes that are remembered."""
_RECENT = 8
"""Of them in the status, newest first."""


class PlanLog:
    """The latest plans of one planner, each with what led to it and what came of it."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._explained: deque[dict[str, Any]] = deque(maxlen=_EXPLAINED)
        self._history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self._actions: Counter[ActionKind] = Counter()
        self._plans = 0
        self._desired: dict[Role, int] = {}
        self._warned: Sequence[str] = ()
        self.tick_s = 0.0
        """How long the last plan took to make and to begin."""
        self.observed: deque[tuple[Observation, Plan]] = deque(maxlen=_EXPLAINED)
        """The latest observations, each with its plan."""

    def planned(
        self, seen: Observation, plan: Plan, results: Sequence[ActionResult], unix_s: float
    ) -> None:
        """A plan was made; ``results`` are those of its actions."""
        self._plans += 1
        texts = [result.text for result in results]
        self.observed.append((seen, plan))
        self._explained.append(_explained(seen, plan, texts, unix_s))
        changes = _changed_roles(self._desired, plan)
        for action, result in zip(plan.actions, results, strict=True):
            if result.done:
                self._actions[action.kind] += 1
                changes.setdefault(action.role, 0)
        for role, change in changes.items():
            self._tell(_summary(change, role, plan, texts), unix_s)
        self._desired = {role: one.desired for role, one in plan.roles.items()}
        for warning in plan.warnings:
            if warning not in self._warned:
                self._history.append({"time": unix_s, "text": f"warning: {warning}"})
                log.warning("plan: %s", warning)
        self._warned = plan.warnings

    def tuned(self, told: Sequence[str], status: Mapping[str, Any], unix_s: float) -> None:
        """Tuning took a step after the last plan: its lines, and its status now."""
        for text in told:
            self._tell(text, unix_s)
        self._explained[-1]["tuning"] = status

    def _tell(self, text: str, unix_s: float) -> None:
        self._history.append({"time": unix_s, "text": text})
        log.info("plan: %s", text)

    def status(self) -> dict[str, Any]:
        """The last plan, and what was done since the start, as plain data."""
        return {
            "kind": self._config.kind,
            "mode": self._config.mode,
            "interval_s": self._config.interval_s,
            "plans": self._plans,
            "tick_s": self.tick_s,
            "actions": {kind.value: self._actions[kind] for kind in ActionKind},
            "last": self._explained[-1] if self._explained else None,
            "recent": list(islice(reversed(self._history), _RECENT)),
        }

    def explain(self, unix_s: float | None = None) -> dict[str, Any] | None:
        """The last plan made until ``unix_s``, by default the last one; None where none is known.

        The latest plans are remembered.
        """
        plans = reversed(self._explained)
        return next((one for one in plans if unix_s is None or one["time"] <= unix_s), None)

    def history(self) -> list[dict[str, Any]]:
        """The latest changes and warnings, oldest first, each with its time and a line."""
        return list(self._history)


def _explained(
    seen: Observation, plan: Plan, outcomes: Sequence[str], unix_s: float
) -> dict[str, Any]:
    """One plan with what led to it and what came of it. ``outcomes`` are those of its actions."""
    arrivals = seen.arrivals
    return {
        "time": unix_s,
        "observed": {
            "window_s": round(seen.window_s, 3),
            "arrivals": None
            if arrivals is None
            else {
                role.value: {
                    "requests": one.requests,
                    "uncached_tokens": one.prompt_tokens,
                    "prompt_tokens": one.context_tokens,
                }
                for role, one in arrivals.items()
            },
            "workers": None if seen.workers is None else len(seen.workers),
            "requests_in_flight": None
            if seen.workers is None
            else sum(one.active_requests for one in seen.workers),
            "output_tokens": seen.output_tokens,
            "waiting_requests": seen.waiting_requests,
            "oldest_wait_s": seen.oldest_wait_s,
            "attained_ttft": seen.attained_ttft,
            "attained_itl": seen.attained_itl,
            "started_s": list(seen.started_s),
        },
        "roles": {role.value: asdict(one) for role, one in plan.roles.items()},
        "actions": [
            {
                "kind": action.kind.value,
                "role": action.role.value,
                "worker_id": action.worker_id,
                "outcome": outcome,
            }
            for action, outcome in zip(plan.actions, outcomes, strict=True)
        ],
        "warnings": list(plan.warnings),
        "tuning": None,
    }


def _changed_roles(before: Mapping[Role, int], plan: Plan) -> dict[Role, int]:
    """By how many workers the plan changes each role that it changes, from ``before``."""
    changes = {role: one.desired - before.get(role, one.ready) for role, one in plan.roles.items()}
    return {role: change for role, change in changes.items() if change}


def _summary(change: int, role: Role, plan: Plan, outcomes: Sequence[str]) -> str:
    """One line about one role: the change, its reason, the workers that there are, the actions."""
    one = plan.roles[role]
    there = f"{one.ready} ready, {one.starting} starting, {one.draining} draining"
    mine = [
        text for action, text in zip(plan.actions, outcomes, strict=True) if action.role is role
    ]
    return "; ".join([f"{change:+} {role}: {one.reason}", there, *mine])

"""Plans for people and for metrics, as plain data. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict

from commutator.contract.planner import Observation, Plan
from commutator.contract.worker import Role

__all__ = ["changed_roles", "explained", "summary"]


def explained(
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


def changed_roles(before: Mapping[Role, int], plan: Plan) -> dict[Role, int]:
    """By how many workers the plan changes each role that it changes, from ``before``."""
    changes = {role: one.desired - before.get(role, one.ready) for role, one in plan.roles.items()}
    return {role: change for role, change in changes.items() if change}


def summary(change: int, role: Role, plan: Plan, outcomes: Sequence[str]) -> str:
    """One line about one role: the change, its reason, the workers that there are, the actions."""
    one = plan.roles[role]
    there = f"{one.ready} ready, {one.starting} starting, {one.draining} draining"
    mine = [
        text for action, text in zip(plan.actions, outcomes, strict=True) if action.role is role
    ]
    return "; ".join([f"{change:+} {role}: {one.reason}", there, *mine])

"""Plans as lines of text."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

__all__ = ["observed_lines", "role_lines", "time_of_day", "tuning_lines"]


def role_lines(plan: dict[str, Any]) -> list[str]:
    return [
        f"{role}: {one['desired']} wanted, {one['ready']} ready, {one['starting']} starting, "
        f"{one['draining']} draining; {one['reason']}; {_speed(one)}"
        for role, one in plan["roles"].items()
    ]


def _speed(role: dict[str, Any]) -> str:
    """What the speed of a worker rests on."""
    if role["residual"] is None:
        return f"speed as told, {role['samples']} samples"
    return f"speed of {role['samples']} samples, residual {role['residual']:.1%}"


def observed_lines(seen: dict[str, Any]) -> list[str]:
    lines = []
    if seen["arrivals"] is None:
        lines.append("observed: arrivals are not known, as no front door reports or one is silent")
    else:
        lines += [
            f"observed: {one['requests']} requests for {role} in {seen['window_s']:g} s, "
            f"{one['uncached_tokens']} of {one['prompt_tokens']} prompt tokens not cached"
            for role, one in seen["arrivals"].items()
        ]
    if seen["requests_in_flight"] is None:
        lines.append("workers are not known: the registry has not been seen yet")
    else:
        lines.append(
            f"{seen['requests_in_flight']} requests in flight at {seen['workers']} workers"
        )
    if seen["waiting_requests"]:
        lines.append(
            f"{seen['waiting_requests']} requests wait for a worker, the oldest for "
            f"{seen['oldest_wait_s']:.1f} s"
        )
    for name, target in (("attained_ttft", "ttft_s"), ("attained_itl", "itl_s")):
        if seen[name] is not None:
            lines.append(f"{seen[name]:.1%} within {target}")
    for seconds in seen["started_s"]:
        lines.append(f"a worker became ready after {seconds:.1f} s")
    return lines


def tuning_lines(told: dict[str, Any] | None) -> list[str]:
    """What tuning does now; nothing where it is off."""
    if told is None:
        return []
    values = ", ".join(f"{option}={value:g}" for option, value in told["options"].items())
    lines = [f"tuning ({told['mode']}): {values}"]
    if (trial := told["trial"]) is not None:
        before, tried = (one["ended"] for one in told["arms"])
        lines.append(
            f"tuning: {trial['option']}={trial['value']:g} is tried on {trial['share']:.0%} of "
            f"requests now; {tried} ended with it, {before} without"
        )
    elif told["searching"]:
        lines.append("tuning: a search runs")
    if told["last"] is not None:
        lines.append(f"tuning, last: {told['last']}")
    return lines


def time_of_day(unix_s: float) -> str:
    """The local time of day."""
    return datetime.fromtimestamp(unix_s, UTC).astimezone().strftime("%H:%M:%S")

"""``commutator planner``: what the planner of a running deployment wants, why, and what it did."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any

import click

from commutator.cli.added import AddedCommands
from commutator.errors import CommutatorError
from commutator_console.front_door import FrontDoor, front_door_options
from commutator_slo.cli.profile import profile_command

_TIME_OF_DAY = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")


class _PlannerGroup(click.Group):
    """Has the commands of other distributions beside core's."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._added().commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        return self._added().load(ctx, cmd_name) if own is None else own

    def _added(self) -> AddedCommands:
        return AddedCommands("planner", self.commands)


@click.group(cls=_PlannerGroup)
def planner() -> None:
    """Show what the planner of a running deployment wants, why, and what it did."""


planner.add_command(profile_command)


@planner.command(epilog="Example: commutator planner status")
@front_door_options
def status(door: FrontDoor) -> None:
    """Print one line about the planner, and one for each role."""
    told = door.administer("GET", "/admin/planner")
    does = "acts" if told["mode"] == "act" else "advises only"
    click.echo(f"{told['kind']} {does}, every {told['interval_s']:g} s; {told['plans']} plans")
    if (last := told["last"]) is None:
        return
    for line in [*_role_lines(last), *_tuning_lines(told.get("tuning"))]:
        click.echo(line)
    for warning in last["warnings"]:
        click.echo(f"warning: {warning}")


@planner.command(
    short_help="Print one plan and what led to it.",
    epilog="Example: commutator planner explain --at 14:05:10",
)
@click.option(
    "--at",
    metavar="TIME",
    help="The last plan until this time: HH:MM:SS of the last 24 hours, or a date and time such "
    "as 2026-05-01T14:05:10; local time without a zone.",
)
@front_door_options
def explain(door: FrontDoor, at: str | None) -> None:
    """Print one plan: what was observed, what led to it, and what came of it."""
    query = "" if at is None else f"?at={_unix_s(at, time.time()):.3f}"
    told = door.administer("GET", f"/admin/planner/explain{query}")
    if told is None:
        raise CommutatorError(
            "no plan is remembered from before that time; the latest 2,000 are"
            if at
            else "the planner has not made a plan yet"
        )
    click.echo(_time_of_day(told["time"]))
    for line in _observed_lines(told["observed"]):
        click.echo(f"  {line}")
    for line in [*_role_lines(told), *_tuning_lines(told.get("tuning"))]:
        click.echo(f"  {line}")
    for action in told["actions"]:
        what = action["worker_id"] or action["role"]
        click.echo(f"  action: {action['kind']} {what}: {action['outcome']}")
    for warning in told["warnings"]:
        click.echo(f"  warning: {warning}")


@planner.command(
    short_help="Print the latest changes and warnings.",
    epilog="Example: commutator planner history -n 20",
)
@click.option(
    "-n", "count", type=click.IntRange(1), default=50, show_default=True, help="How many lines."
)
@front_door_options
def history(door: FrontDoor, count: int) -> None:
    """Print the latest changes and warnings, one line each; the planner remembers 1,000."""
    for one in door.administer("GET", "/admin/planner/history")[-count:]:
        click.echo(f"{_time_of_day(one['time'])} {one['text']}")


def _unix_s(text: str, now_unix_s: float) -> float:
    """Seconds since 1970 of a time of day, the last one that is not to come, or of a date."""
    try:
        if _TIME_OF_DAY.fullmatch(text):
            today = datetime.fromtimestamp(now_unix_s, UTC).astimezone().date()
            padded = text.zfill(8 if text.count(":") == 2 else 5)  # noqa: PLR2004
            found = datetime.fromisoformat(f"{today}T{padded}").astimezone().timestamp()
            return found - 86_400 if found > now_unix_s else found
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError as error:
        raise CommutatorError(
            f"--at {text}: expected a time such as 14:05:10 or 2026-05-01T14:05:10"
        ) from error


# ------------------------------------------------------------------------- plans as text


def _role_lines(plan: dict[str, Any]) -> list[str]:
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


def _observed_lines(seen: dict[str, Any]) -> list[str]:
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


def _tuning_lines(told: dict[str, Any] | None) -> list[str]:
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


def _time_of_day(unix_s: float) -> str:
    """The local time of day."""
    return datetime.fromtimestamp(unix_s, UTC).astimezone().strftime("%H:%M:%S")

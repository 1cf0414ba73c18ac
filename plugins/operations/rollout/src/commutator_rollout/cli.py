"""``commutator apply``, ``commutator diff`` and ``commutator rollout``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from commutator.cli.options import NumberRange, set_option
from commutator.errors import CommutatorError
from commutator_console.front_door import FrontDoor, LostError, front_door_options
from commutator_rollout.plugin import PATH

APPLY_S = 900.0
"""The deployment may have to download a model before it accepts a file."""
_POLL_S = 0.3
_DIFFERS = 3
_FAILED = 3
_LATE = 4
_DASH = "-"

_files = click.argument(
    "files",
    metavar="[FILE]...",
    nargs=-1,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_forget = click.option(
    "--forget-changes", is_flag=True, help="Drop values that were set by --set before."
)
why_option = click.option("--why", default="", metavar="TEXT", help="The reason, for the history.")
_wait_s = click.option(
    "--timeout",
    "timeout_s",
    type=NumberRange(min=0),
    default=1800.0,
    show_default=True,
    help="With --wait, seconds after which to stop waiting.",
)


@click.command(
    short_help="Change a running deployment to what a file describes.",
    epilog="Example: commutator apply commutator.yaml --wait",
)
@_files
@set_option
@_forget
@why_option
@click.option("--dry-run", is_flag=True, help="Check it and show what it would change.")
@click.option("--wait", is_flag=True, help="Show the progress, and wait until it runs completely.")
@_wait_s
@json_option
@front_door_options
def apply(
    door: FrontDoor,
    files: tuple[Path, ...],
    sets: tuple[str, ...],
    forget_changes: bool,
    why: str,
    dry_run: bool,
    wait: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Change a running deployment to what FILE describes; later files override earlier ones.

    No request is lost: front doors read the file again, new workers are ready before old ones
    drain. A file that does not pass every check changes nothing. --set changes one value beside
    the file, and stays until --forget-changes; without FILE, the file stays as it is.

    Exit status: 0 done, or accepted without --wait; 1 refused; 3 it failed; 4 not within --timeout.
    """
    if not files and not sets and not forget_changes:
        raise click.UsageError("name a FILE, --set PATH=VALUE or --forget-changes")
    body = body_of(files, sets, forget=forget_changes, why=why) | {"dry_run": dry_run}
    report = door.administer("POST", f"{PATH}/apply", body, timeout_s=APPLY_S)
    if as_json and not wait:
        click.echo(json.dumps(report, indent=2))
    elif not as_json:
        show_report(report)
    if dry_run:
        return
    if not report["accepted"]:
        if not as_json:
            click.echo(f"generation {report['generation']} stays: nothing changes")
        return
    if not as_json:
        click.echo(f"generation {report['generation']} is accepted")
    if wait:
        wait_for(door, report["generation"], timeout_s, as_json=as_json)


@click.command(
    short_help="Show what apply would change, and what that costs.",
    epilog="Example: commutator diff commutator.yaml",
)
@_files
@set_option
@_forget
@json_option
@front_door_options
def diff(
    door: FrontDoor,
    files: tuple[Path, ...],
    sets: tuple[str, ...],
    forget_changes: bool,
    as_json: bool,
) -> None:
    """Show what `commutator apply` would change in a running deployment, and what that costs.

    Each option with its values before and after, and when it takes effect; workers that are
    started, replaced and drained, and the KV blocks that go with them.

    Exit status: 0 nothing would change; 3 something would; 1 it would be refused.
    """
    if not files and not sets and not forget_changes:
        raise click.UsageError("name a FILE, --set PATH=VALUE or --forget-changes")
    body = body_of(files, sets, forget=forget_changes, why="")
    report = door.administer("POST", f"{PATH}/diff", body, timeout_s=APPLY_S)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show_report(report)
    if report["changes"] or report["workers"]:
        sys.exit(_DIFFERS)
    if not as_json:
        click.echo("nothing would change")


@click.group(epilog="Example: commutator rollout status")
def rollout() -> None:
    """Show, pause, resume or undo a change of a running deployment; list the last ones."""


@rollout.command(epilog="Example: commutator rollout status --wait")
@click.option("--wait", is_flag=True, help="Show the progress, and wait until it runs completely.")
@_wait_s
@json_option
@front_door_options
def status(door: FrontDoor, wait: bool, timeout_s: float, as_json: bool) -> None:
    """Show the present generation, and each worker that is not as it is wanted.

    Exit status with --wait: 0 it runs completely; 3 it failed; 4 not within --timeout.
    """
    found = door.administer("GET", PATH)
    if wait:
        wait_for(door, found["generation"], timeout_s, as_json=as_json)
    elif as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show_status(found)


def _changing(name: str, text: str) -> Callable[..., None]:
    @rollout.command(name, help=text, epilog=f"Example: commutator rollout {name}")
    @json_option
    @front_door_options
    def command(door: FrontDoor, as_json: bool) -> None:
        found = door.administer("POST", f"{PATH}/{name}", {})
        if as_json:
            click.echo(json.dumps(found, indent=2))
        else:
            _show_status(found)

    made: Callable[..., None] = command
    return made


pause = _changing("pause", "Start, drain and replace nothing more until `resume`.")
resume = _changing("resume", "Go on with what was paused.")


@rollout.command(epilog="Example: commutator rollout undo --to 3 --wait")
@click.option("--to", type=click.IntRange(min=1), metavar="N", help="The generation to go back to.")
@why_option
@click.option("--wait", is_flag=True, help="Show the progress, and wait until it runs completely.")
@_wait_s
@json_option
@front_door_options
def undo(
    door: FrontDoor, to: int | None, why: str, wait: bool, timeout_s: float, as_json: bool
) -> None:
    """Go back to generation N; by default to the last one that ran completely.

    It becomes a new generation, and what was set by --set since is undone with the rest.
    """
    body = {"to": to, "why": why}
    report = door.administer("POST", f"{PATH}/undo", body, timeout_s=APPLY_S)
    if as_json and not wait:
        click.echo(json.dumps(report, indent=2))
    elif not as_json:
        show_report(report)
        click.echo(f"generation {report['generation']} is accepted")
    if wait:
        wait_for(door, report["generation"], timeout_s, as_json=as_json)


@rollout.command(epilog="Example: commutator rollout history")
@json_option
@front_door_options
def history(door: FrontDoor, as_json: bool) -> None:
    """List the last generations: who changed what should run, when and why."""
    found = door.administer("GET", f"{PATH}/history")
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    rows = [("GENERATION", "STATE", "WHEN", "WHO", "FROM", "WHY")]
    for one in found:
        when = datetime.fromtimestamp(one["when_unix_s"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        why = one["cause"] if one["state"] == "failed" else one["why"]
        row = (str(one["generation"]), one["state"], when, one["who"], one["source"], why or _DASH)
        rows.append(row)
    print_table(rows)


def body_of(
    files: Sequence[Path], sets: Sequence[str], *, forget: bool, why: str
) -> dict[str, Any]:
    """A configuration as the deployment reads it: each value with where it was written.

    Raises ConfigError for files that cannot be read.
    """
    from commutator.config.load import read_files
    from commutator.errors import ConfigError

    problems: list[str] = []
    tree = _packed(read_files(files, problems)) if files else None
    if problems:
        raise ConfigError(problems, ", ".join(map(str, files)))
    source = ", ".join(map(str, files))
    return {"tree": tree, "sets": list(sets), "forget": forget, "why": why, "source": source}


def _packed(node: Any) -> list[Any]:
    value = node.value
    if isinstance(value, dict):
        value = {key: _packed(item) for key, item in value.items()}
    elif isinstance(value, list):
        value = [_packed(item) for item in value]
    return [value, node.origin]


_EFFECTS = {
    "live": "at once",
    "new requests": "for new requests",
    "workers": "as workers are replaced",
    "doors": "as front doors are replaced",
    "never": "after a restart of serve",
}


def show_report(report: Mapping[str, Any]) -> None:
    """Print what a change does: to options, front doors and workers."""
    for one in report["changes"]:
        effect = _EFFECTS.get(one["takes_effect"], one["takes_effect"])
        click.echo(f"{one['path']}: {_value(one['before'])} -> {_value(one['after'])}  ({effect})")
    for path in report["forgotten_changes"]:
        click.echo(f"{path}: was set by --set, and its entry is gone")
    if report["doors_replaced"]:
        click.echo("front doors: replaced one after another")
    for row in report["workers"]:
        parts = [
            f"{row[name]} {name}"
            for name in ("kept", "replaced", "started", "drained")
            if row[name]
        ]
        lost = row.get("kv_blocks_lost")
        cost = f"; {lost} cached KV blocks are lost" if lost else ""
        if row["devices_each"] and row["replaced"]:
            spare = row["devices_each"] * report["surge"]
            cost += f"; {spare} free GPUs avoid draining first" if spare else ""
        click.echo(f"workers of {row['engine']}: {', '.join(parts)}{cost}")
    for one in report["named_changes"]:
        click.echo(_named_line(one))


def _named_line(one: Mapping[str, Any]) -> str:
    why = f": {one['why']}" if one["why"] else ""
    return f"beside the file: {one['path']} = {_value(one['value'])}, by {one['who']}{why}"


def _canary_line(one: Mapping[str, Any]) -> str:
    text = f"canary {one['model']} of {one['alias']}, {one['share']:.1%}: "
    if one["verdict"] is not None:
        return f"{text}{one['verdict']}"
    if one["serves_for_s"] is None:
        return text + "gets its share when it is ready"
    name, nearest = max(one["evidence"].items(), key=lambda item: item[1])
    return text + (
        f"judged for {one['serves_for_s']:.0f} of {one['judge_for_s']:.0f} s; {one['requests']}; "
        f"nearest to a roll back: {name}, {max(0.0, nearest):.0%}"
    )


def _value(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004 - fits a line


def _show_status(found: Mapping[str, Any]) -> None:
    click.echo(_headline(found))
    for line in found["waits"]:
        click.echo(f"waits: {line}")
    for one in found["canaries"]:
        click.echo(_canary_line(one))
    for one in found["named_changes"]:
        click.echo(_named_line(one))
    if not found["kept_over_restarts"]:
        click.echo("what should run is not kept over a restart; see the log of `commutator serve`")
    rows = [("WORKER", "ENGINE", "STATE", "GENERATION", "AS WANTED")]
    for one in found["workers"]:
        wanted = "yes" if one["as_wanted"] else "no"
        state = one["phase"] + (f", failed {one['failures']} times" if one["failures"] else "")
        rows.append((one["worker_id"], one["engine"], state, one["generation"], wanted))
    print_table(rows)


def _headline(found: Mapping[str, Any]) -> str:
    state = "paused" if found["paused"] and found["state"] == "rolling" else found["state"]
    workers = found["workers"]
    ready = sum(one["as_wanted"] and one["phase"] == "ready" for one in workers)
    others = sum(not one["as_wanted"] for one in workers)
    starting = sum(one["as_wanted"] and one["phase"] == "starting" for one in workers)
    text = f"generation {found['generation']} ({found['source']}): {state}; {ready} ready"
    text += f", {starting} starting" if starting else ""
    text += f", {others} of before" if others else ""
    return text + (f": {found['cause']}" if found["cause"] else "")


def wait_for(door: FrontDoor, generation: int, timeout_s: float, *, as_json: bool) -> None:
    """Show progress until ``generation`` runs completely; exits otherwise as documented."""
    deadline_s, said = time.monotonic() + timeout_s, ""
    while True:
        try:
            found = door.administer("GET", PATH)
        except LostError:  # front doors may be replaced
            found = None
        if found is not None:
            if not as_json and (line := _headline(found)) != said:
                said = line
                click.echo(line)
            row = _row_of(door, found, generation)
            if row["state"] in ("complete", "failed", "replaced"):
                break
        if time.monotonic() > deadline_s:
            click.secho(f"generation {generation} still rolls", fg="yellow", err=True)
            sys.exit(_LATE)
        time.sleep(_POLL_S)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    if row["state"] == "complete":
        return
    what = f"has failed: {row['cause']}" if row["state"] == "failed" else "was replaced by another"
    click.secho(f"error: generation {generation} {what}", fg="red", err=True)
    sys.exit(_FAILED)


def _row_of(door: FrontDoor, found: Mapping[str, Any], generation: int) -> Mapping[str, Any]:
    if found["generation"] == generation:
        return found
    rows: list[Mapping[str, Any]] = door.administer("GET", f"{PATH}/history")
    row = next((one for one in rows if one["generation"] == generation), None)
    if row is None:
        raise CommutatorError(f"generation {generation} is not kept any more")
    return row


def print_table(rows: Sequence[Iterable[str]]) -> None:
    """In columns as wide as their longest cell; the first row has their names."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())

"""``commutator worker``: workers of a running deployment; workers of one host of a cluster."""

from __future__ import annotations

import json
import sys
import time
from typing import Any
from urllib.parse import quote

import click

from commutator.cli.options import NumberRange, Sources, configuration_options
from commutator.cli.serve import must_be_shared, run_deployment
from commutator.contract.worker import Role
from commutator.errors import CommutatorError
from commutator_console.front_door import FrontDoor, front_door_options, start_text

_POLL_S = 0.2

_IDLE_POLLS = 3
"""Polls without requests, in a row: another front door may have sent one before it was informed."""

_CHANGE_TIMEOUT_S = 5.0
"""A front door normally follows a change of the registry within milliseconds."""


class _Workers(click.Group):
    """`commutator worker FILE` is `commutator worker run FILE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=_Workers, epilog="Example: commutator worker cluster.yaml --engine reference --replicas 2"
)
def worker() -> None:
    """List the workers of a running deployment; drain one, bring it back, change its role.

    `commutator worker FILE` is short for `commutator worker run FILE`.
    """


@worker.command(epilog="Example: commutator worker cluster.yaml --engine reference --replicas 2")
@configuration_options
@click.option("--engine", "name", required=True, metavar="NAME", help="The `engines` entry.")
@click.option("--replicas", type=click.IntRange(1, 10_000), help="How many; by default as in FILE.")
def run(sources: Sources, name: str, replicas: int | None) -> None:
    """Run workers of one engine that FILE describes, and no front door.

    Front doors of other hosts find them in the registry, which has to be one that hosts share.
    """
    from attrs import evolve

    loaded = sources.load()
    config = loaded.config
    must_be_shared(config, "no front door would find these workers")
    if name not in (known := [str(engine.name) for engine in config.engines]):
        raise CommutatorError(f"no engine is named {name!r}; there are: {', '.join(known)}")
    if replicas is not None:
        engines = tuple(
            evolve(engine, replicas=replicas) if engine.name == name else engine
            for engine in config.engines
        )
        loaded = evolve(loaded, config=evolve(config, engines=engines))
    sys.exit(run_deployment(loaded, engine=name, front_doors=0))


@worker.command(
    short_help="List workers with their state and requests.", epilog="Example: commutator worker ls"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as /health has it.")
@front_door_options
def ls(door: FrontDoor, as_json: bool) -> None:
    """Print one line for each worker: its state, and its requests or what went wrong."""
    health = door.health()
    workers = sorted(health["workers"] + health["unready_workers"], key=lambda w: w["worker_id"])
    if as_json:
        click.echo(json.dumps(workers, indent=2))
        return
    widths = [max([len(w[field]) for w in workers], default=0) for field in ("worker_id", "model")]
    for one in workers:
        role = "" if one["role"] == Role.BOTH else f"{one['role']}, "
        pid = f", pid {one['pid']}" if one.get("pid") else ""
        doing = (
            f"{requests_text(one['active_requests_of_all'])}{pid}"
            if "active_requests_of_all" in one
            else start_text(one, time.time())
        )
        click.echo(
            f"{one['worker_id']:<{widths[0]}}  {one['model']:<{widths[1]}}  {one['kind']}  "
            f"{role}{one['state']}, {doing}"
        )


@worker.command(epilog="Example: commutator worker drain reference-0 --wait 60")
@click.argument("worker_id", metavar="ID")
@front_door_options
@click.option(
    "--wait",
    "wait_s",
    type=NumberRange(min=0),
    help="Wait at most this many seconds for its requests to finish.",
)
@click.option("--force", is_flag=True, help="Drain it even if its model has no other worker.")
def drain(worker_id: str, door: FrontDoor, wait_s: float | None, force: bool) -> None:
    """Stop sending requests to worker ID. It finishes those it has.

    It stays drained, even after a restart, until `commutator worker undrain ID`.
    """
    chosen = _find(door, worker_id)
    if not force:
        _must_leave_another(door, chosen)
    _change(door, worker_id, True)
    if wait_s is None:
        click.echo(f"{worker_id} gets no new requests")
        return
    running = _wait_until_idle(door, worker_id, wait_s)
    if running:
        raise CommutatorError(
            f"{worker_id} gets no new requests, but after {wait_s:g} s it still has {running}; "
            "run the command again with a longer --wait"
        )
    click.echo(f"{worker_id} gets no new requests and has none left")


@worker.command(epilog="Example: commutator worker undrain reference-0")
@click.argument("worker_id", metavar="ID")
@front_door_options
def undrain(worker_id: str, door: FrontDoor) -> None:
    """Send requests to worker ID again."""
    _change(door, worker_id, False)
    click.echo(f"{worker_id} gets requests again")


@worker.command(
    short_help="Make worker ID prefill, decode or do both.",
    epilog="Example: commutator worker role reference-0 prefill",
)
@click.argument("worker_id", metavar="ID")
@click.argument("new_role", metavar="ROLE", type=click.Choice([role.value for role in Role]))
@front_door_options
@click.option(
    "--wait",
    "wait_s",
    type=NumberRange(min=0),
    default=300.0,
    show_default=True,
    help="Wait at most this many seconds for its requests to finish, or change nothing.",
)
@click.option(
    "--force", is_flag=True, help="Change it even if no other worker of its model can decode."
)
def role(worker_id: str, new_role: str, door: FrontDoor, wait_s: float, force: bool) -> None:
    """Make worker ID a prefill worker, a decode worker, or one for both.

    ROLE is prefill, decode or both. The worker is drained first and gets requests again afterwards.
    It keeps the role, even after a restart, until this command changes it again.
    """
    wanted, chosen = Role(new_role), _find(door, worker_id)
    if chosen["role"] == wanted:
        click.echo(f"{worker_id} already has the role {wanted}")
        return
    _must_be_able(door, chosen, wanted)
    if wanted is Role.PREFILL and not force:
        _must_leave_another(door, chosen)
    _change(door, worker_id, True)
    try:
        running = _wait_until_idle(door, worker_id, wait_s)
        if running:
            raise CommutatorError(
                f"after {wait_s:g} s {worker_id} still has {running} requests, so its role remains "
                f"{chosen['role']}; run the command again with a longer --wait"
            )
        _change(door, worker_id, wanted)
    finally:
        if chosen["state"] != "draining":
            _change(door, worker_id, False)
    click.echo(f"{worker_id} now has the role {wanted}")


def _find(door: FrontDoor, worker_id: str) -> dict[str, Any]:
    return door.workers(worker_id)[0]


def _must_leave_another(door: FrontDoor, chosen: dict[str, Any]) -> None:
    """Refuse to take away the last ready worker of a model that can serve whole requests."""
    others = [
        one
        for one in door.workers()
        if one["model"] == chosen["model"]
        and one["worker_id"] != chosen["worker_id"]
        and one["state"] == "ready"
        and one["role"] != Role.PREFILL
    ]
    if not others and chosen["role"] != Role.PREFILL:
        raise CommutatorError(
            f"{chosen['worker_id']} is the last ready worker of {chosen['model']} that can decode: "
            "requests would be refused\n  add --force to do it anyway"
        )


def requests_text(count: int) -> str:
    """A number of requests, for people."""
    return f"{count} request" if count == 1 else f"{count} requests"


def _must_be_able(door: FrontDoor, chosen: dict[str, Any], wanted: Role) -> None:
    if wanted is not Role.BOTH and not chosen["hands_over"]:
        raise CommutatorError(
            f"{chosen['worker_id']} cannot hand KV over, so its role must be both; our own "
            "engines need NIXL for that: run `make tiers`"
        )
    if wanted is Role.PREFILL and chosen["model"] not in door.health()["prefill_queues"]:
        raise CommutatorError(
            "a prefill worker would get no requests: the configuration has no section "
            "`disaggregation`"
        )


def _wait_until_idle(door: FrontDoor, worker_id: str, wait_s: float) -> int:
    """Wait at most ``wait_s`` for a drained worker; returns the requests that it still has."""
    deadline_s = time.monotonic() + wait_s
    idle_polls = 0
    while idle_polls < _IDLE_POLLS:
        running = _running(door, _find(door, worker_id))
        idle_polls = 0 if running else idle_polls + 1
        if running and time.monotonic() > deadline_s:
            return running
        time.sleep(_POLL_S)
    return 0


def _running(door: FrontDoor, one: dict[str, Any]) -> int:
    """The worker's requests, as counted by the front doors and, if possible, by the worker."""
    routed = int(one["active_requests_of_all"])
    if one["admin_address"] is None:
        return routed
    load = door.administer("GET", f"{_path(one['worker_id'])}/load")
    return max(routed, int(load["running"]) + int(load["waiting"]))


def _path(worker_id: str) -> str:
    return f"/admin/workers/{quote(worker_id, safe='')}"


def _change(door: FrontDoor, worker_id: str, value: bool | Role) -> None:
    """Set a role or draining, and wait until the front door shows it."""
    _find(door, worker_id)
    draining = "drain" if value else "undrain"
    act = f"role/{value.value}" if isinstance(value, Role) else draining
    door.administer("POST", f"{_path(worker_id)}/{act}")
    deadline_s = time.monotonic() + _CHANGE_TIMEOUT_S
    while _current(_find(door, worker_id), value) != value:
        if time.monotonic() > deadline_s:
            raise CommutatorError(
                f"{door.url} did not follow the change within {_CHANGE_TIMEOUT_S:g} s"
            )
        time.sleep(_POLL_S / 10)


def _current(one: dict[str, Any], value: bool | Role) -> bool | Role:
    """The role or draining state that the front door shows."""
    return Role(one["role"]) if isinstance(value, Role) else one["state"] == "draining"

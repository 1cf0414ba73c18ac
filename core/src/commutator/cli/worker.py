"""``commutator worker``: the workers of a running deployment, their draining and their roles."""

from __future__ import annotations

import click

from commutator.cli.options import NumberRange, front_door_options
from commutator.cli.worker_changes import (
    ask_health,
    change,
    find,
    must_be_able,
    must_leave_another,
    role_words,
    set_draining,
    wait_until_idle,
)
from commutator.errors import CommutatorError
from commutator.types import Role

__all__ = ["worker"]


@click.group()
def worker() -> None:
    """List the workers of a running deployment; drain one, bring it back, change its role."""


@worker.command(epilog="Example: commutator worker ls")
@front_door_options
def ls(url: str, api_key: str | None) -> None:
    """One line for each worker: its state and its requests."""
    workers = ask_health(url, api_key)["workers"]
    widths = [max([len(w[field]) for w in workers], default=0) for field in ("worker_id", "model")]
    for one in workers:
        click.echo(
            f"{one['worker_id']:<{widths[0]}}  {one['model']:<{widths[1]}}  {one['kind']}  "
            f"{role_words(one)}{one['state']}, {one['active_requests_of_all']} requests"
        )


@worker.command(epilog="Example: commutator worker drain reference-0 --wait 60")
@click.argument("worker_id", metavar="ID")
@front_door_options
@click.option(
    "--wait",
    "wait_s",
    type=NumberRange(min=0),
    help="Wait at most so many seconds for its requests to finish.",
)
@click.option("--force", is_flag=True, help="Even if no other worker of its model is left.")
def drain(worker_id: str, url: str, api_key: str | None, wait_s: float | None, force: bool) -> None:
    """Give worker ID nothing new. What it has begun, it finishes.

    It stays drained, even when it is started again, until `commutator worker undrain ID`.
    """
    health = ask_health(url, api_key)
    chosen = find(health, worker_id, url)
    must_leave_another(health, chosen, force)
    set_draining(health, url, api_key, worker_id, True)
    if wait_s is None:
        click.echo(f"{worker_id} gets nothing new")
        return
    running = wait_until_idle(worker_id, url, api_key, wait_s)
    if running:
        raise CommutatorError(
            f"{worker_id} gets nothing new, but after {wait_s:g} s it still has {running} "
            "requests; ask again with a longer --wait"
        )
    click.echo(f"{worker_id} gets nothing new, and has nothing left to do")


@worker.command(epilog="Example: commutator worker undrain reference-0")
@click.argument("worker_id", metavar="ID")
@front_door_options
def undrain(worker_id: str, url: str, api_key: str | None) -> None:
    """Let worker ID have requests again."""
    health = ask_health(url, api_key)
    set_draining(health, url, api_key, worker_id, False)
    click.echo(f"{worker_id} is back")


@worker.command(epilog="Example: commutator worker role reference-0 prefill")
@click.argument("worker_id", metavar="ID")
@click.argument("new_role", metavar="ROLE", type=click.Choice([role.value for role in Role]))
@front_door_options
@click.option(
    "--wait",
    "wait_s",
    type=NumberRange(min=0),
    default=300.0,
    show_default=True,
    help="Wait at most so many seconds for its requests to finish; else nothing changes.",
)
@click.option("--force", is_flag=True, help="Even if no other worker of its model could decode.")
def role(
    worker_id: str, new_role: str, url: str, api_key: str | None, wait_s: float, force: bool
) -> None:
    """Make worker ID a prefill or decode worker, or one for both.

    It is drained first, and takes requests again afterwards. It keeps its role, even when it is
    started again, until it is changed again.
    """
    wanted, health = Role(new_role), ask_health(url, api_key)
    chosen = find(health, worker_id, url)
    if chosen["role"] == wanted:
        click.echo(f"{worker_id} is {wanted} already")
        return
    must_be_able(health, chosen, wanted)
    if wanted is Role.PREFILL:
        must_leave_another(health, chosen, force)
    drained_before = chosen["state"] == "draining"
    set_draining(health, url, api_key, worker_id, True)
    try:
        running = wait_until_idle(worker_id, url, api_key, wait_s)
        if running:
            raise CommutatorError(
                f"after {wait_s:g} s {worker_id} still has {running} requests, so it is "
                f"{chosen['role']} as before; ask again with a longer --wait"
            )
        change(health, url, api_key, worker_id, wanted)
    finally:
        if not drained_before:
            set_draining(health, url, api_key, worker_id, False)
    click.echo(f"{worker_id} is {wanted} now")

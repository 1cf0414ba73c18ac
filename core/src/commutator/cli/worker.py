"""``commutator worker``: the workers of a running deployment, and taking one out of routing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from commutator.cli.route import call
from commutator.engine.client import TokenApiClient
from commutator.errors import CommutatorError, RegistryError
from commutator.types import EngineLoad

__all__ = ["worker"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_LOOK_S = 0.2
_QUIET_LOOKS = 3
"""So often in a row: another front door may have sent something just before it heard."""
_HEARD_S = 5.0
"""A front door hears of a change within milliseconds; this is when something is wrong."""


@click.group()
def worker() -> None:
    """List the workers of a running deployment; drain one and bring it back."""


def front_door_options(command: CommandT) -> CommandT:
    """``--url`` and ``--api-key``."""
    url = click.option(
        "--url", default="http://127.0.0.1:8000", show_default=True, help="The front door."
    )
    key = click.option(
        "--api-key", envvar="COMMUTATOR_API_KEY", help="Bearer token, if one is needed."
    )
    return url(key(command))


@worker.command()
@front_door_options
def ls(url: str, api_key: str | None) -> None:
    """One line for each worker: its state and its requests."""
    workers = _health(url, api_key)["workers"]
    widths = [max([len(w[field]) for w in workers], default=0) for field in ("worker_id", "model")]
    for one in workers:
        click.echo(
            f"{one['worker_id']:<{widths[0]}}  {one['model']:<{widths[1]}}  {one['kind']}  "
            f"{one['state']}, {one['active_requests_of_all']} requests"
        )


@worker.command(epilog="Example: commutator worker drain reference-0 --wait 60")
@click.argument("worker_id", metavar="ID")
@front_door_options
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    help="Wait at most so many seconds for its requests to finish.",
)
@click.option("--force", is_flag=True, help="Even if no other worker of its model is left.")
def drain(worker_id: str, url: str, api_key: str | None, wait_s: float | None, force: bool) -> None:
    """Give worker ID nothing new. What it has begun, it finishes.

    It stays drained, even when it is started again, until `commutator worker undrain ID`.
    """
    health = _health(url, api_key)
    chosen = _find(health, worker_id, url)
    others = [
        one
        for one in health["workers"]
        if one["model"] == chosen["model"] and one is not chosen and one["state"] == "ready"
    ]
    if not others and not force:
        raise CommutatorError(
            f"{worker_id} is the last ready worker of {chosen['model']}: requests would be refused"
            "\n  add --force to drain it nevertheless"
        )
    _set_draining(health, url, api_key, worker_id, True)
    if wait_s is None:
        click.echo(f"{worker_id} gets nothing new")
        return
    deadline_s = time.monotonic() + wait_s
    quiet = 0
    while quiet < _QUIET_LOOKS:
        running = _running(_find(_health(url, api_key), worker_id, url))
        quiet = 0 if running else quiet + 1
        if running and time.monotonic() > deadline_s:
            raise CommutatorError(
                f"{worker_id} gets nothing new, but after {wait_s:g} s it still has {running} "
                "requests; ask again with a longer --wait"
            )
        time.sleep(_LOOK_S)
    click.echo(f"{worker_id} gets nothing new, and has nothing left to do")


@worker.command(epilog="Example: commutator worker undrain reference-0")
@click.argument("worker_id", metavar="ID")
@front_door_options
def undrain(worker_id: str, url: str, api_key: str | None) -> None:
    """Let worker ID have requests again."""
    health = _health(url, api_key)
    _set_draining(health, url, api_key, worker_id, False)
    click.echo(f"{worker_id} is back")


def _health(url: str, api_key: str | None) -> dict[str, Any]:
    _, health = call(f"{url.rstrip('/')}/health", api_key)
    return health


def _find(health: dict[str, Any], worker_id: str, url: str) -> dict[str, Any]:
    for one in health["workers"]:
        if one["worker_id"] == worker_id:
            found: dict[str, Any] = one
            return found
    names = ", ".join(one["worker_id"] for one in health["workers"])
    raise CommutatorError(f"{url} has no worker {worker_id!r}; it has: {names or 'none'}")


def _running(one: dict[str, Any]) -> int:
    """Requests that the worker has, by the front doors and, where it can be asked, by itself."""
    told = int(one["active_requests_of_all"])
    if one["admin_address"] is None:
        return told
    load = asyncio.run(_ask_load(one["admin_address"]))
    return max(told, load.running + load.waiting)


async def _ask_load(address: str) -> EngineLoad:
    client = TokenApiClient(address)
    try:
        return await client.load()
    finally:
        await client.close()


def _set_draining(
    health: dict[str, Any], url: str, api_key: str | None, worker_id: str, draining: bool
) -> None:
    """Tell the registry, and wait until the front door has heard of it."""
    _find(health, worker_id, url)
    address = health["registry"]
    if address is None:
        raise CommutatorError(f"{url} follows no registry, so nothing can be told to its workers")
    try:
        found = asyncio.run(_tell_registry(address, worker_id, draining))
    except RegistryError as error:
        raise CommutatorError(f"{error}\n  run this on the machine of the registry") from error
    if not found:
        raise CommutatorError(f"{worker_id} left the registry a moment ago")
    deadline_s = time.monotonic() + _HEARD_S
    while (_find(_health(url, api_key), worker_id, url)["state"] == "draining") != draining:
        if time.monotonic() > deadline_s:
            raise CommutatorError(f"{url} has not heard of it after {_HEARD_S:g} s")
        time.sleep(_LOOK_S / 10)


async def _tell_registry(address: str, worker_id: str, draining: bool) -> bool:
    from commutator.runtime.registry_client import (  # noqa: PLC0415 - keeps --help quick
        RegistryClient,
    )

    client = RegistryClient(address)
    try:
        return await client.set_draining(worker_id, draining)
    finally:
        await client.close()

"""Asks a front door about its workers, and tells the registry what shall change."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from commutator.cli.route import call
from commutator.engine.client import TokenApiClient
from commutator.errors import CommutatorError, RegistryError
from commutator.types import EngineLoad, Role

__all__ = [
    "ask_health",
    "change",
    "find",
    "must_be_able",
    "must_leave_another",
    "role_words",
    "set_draining",
    "wait_until_idle",
]

_LOOK_S = 0.2
_QUIET_LOOKS = 3
"""So often in a row: another front door may have sent something just before it heard."""
_HEARD_S = 5.0
"""A front door hears of a change within milliseconds; this is when something is wrong."""


def ask_health(url: str, api_key: str | None) -> dict[str, Any]:
    _, health = call(f"{url}/health", api_key)
    return health


def find(health: dict[str, Any], worker_id: str, url: str) -> dict[str, Any]:
    for one in health["workers"]:
        if one["worker_id"] == worker_id:
            found: dict[str, Any] = one
            return found
    names = ", ".join(one["worker_id"] for one in health["workers"])
    raise CommutatorError(f"{url} has no worker {worker_id!r}; it has: {names or 'none'}")


def role_words(one: dict[str, Any]) -> str:
    return "" if one["role"] == Role.BOTH else f"{one['role']}, "


def must_leave_another(health: dict[str, Any], chosen: dict[str, Any], force: bool) -> None:
    """A model without a worker that serves whole requests answers nothing."""
    others = [
        one
        for one in health["workers"]
        if one["model"] == chosen["model"]
        and one is not chosen
        and one["state"] == "ready"
        and one["role"] != Role.PREFILL
    ]
    if not others and not force and chosen["role"] != Role.PREFILL:
        raise CommutatorError(
            f"{chosen['worker_id']} is the last ready worker of {chosen['model']}: requests would "
            "be refused\n  add --force to do it nevertheless"
        )


def must_be_able(health: dict[str, Any], chosen: dict[str, Any], wanted: Role) -> None:
    if wanted is not Role.BOTH and not chosen["hands_over"]:
        raise CommutatorError(
            f"{chosen['worker_id']} hands no KV over, so its role can only be both; our own "
            "engines need NIXL for that, by `make tiers`"
        )
    if wanted is Role.PREFILL and chosen["model"] not in health["prefill_queues"]:
        raise CommutatorError(
            "a prefill worker would get nothing to do: the configuration has no section "
            "`disaggregation`"
        )


def wait_until_idle(worker_id: str, url: str, api_key: str | None, wait_s: float) -> int:
    """How many requests a drained worker still has after so long, at most; 0 once it has none."""
    deadline_s = time.monotonic() + wait_s
    quiet = 0
    while quiet < _QUIET_LOOKS:
        running = _running(find(ask_health(url, api_key), worker_id, url))
        quiet = 0 if running else quiet + 1
        if running and time.monotonic() > deadline_s:
            return running
        time.sleep(_LOOK_S)
    return 0


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


def set_draining(
    health: dict[str, Any], url: str, api_key: str | None, worker_id: str, draining: bool
) -> None:
    change(health, url, api_key, worker_id, draining)


def change(
    health: dict[str, Any],
    url: str,
    api_key: str | None,
    worker_id: str,
    value: bool | Role,
) -> None:
    """Tell the registry a role, or whether to drain; wait until the front door has heard of it."""
    find(health, worker_id, url)
    address = health["registry"]
    if address is None:
        raise CommutatorError(f"{url} follows no registry, so nothing can be told to its workers")
    try:
        found = asyncio.run(_tell_registry(address, worker_id, value))
    except RegistryError as error:
        raise CommutatorError(f"{error}\n  run this on the machine of the registry") from error
    if not found:
        raise CommutatorError(f"{worker_id} left the registry a moment ago")
    deadline_s = time.monotonic() + _HEARD_S
    while _told(find(ask_health(url, api_key), worker_id, url), value) != value:
        if time.monotonic() > deadline_s:
            raise CommutatorError(f"{url} has not heard of it after {_HEARD_S:g} s")
        time.sleep(_LOOK_S / 10)


def _told(one: dict[str, Any], value: bool | Role) -> bool | Role:
    """What the front door knows of the same."""
    return Role(one["role"]) if isinstance(value, Role) else one["state"] == "draining"


async def _tell_registry(address: str, worker_id: str, value: bool | Role) -> bool:
    from commutator.runtime.registry_client import RegistryClient

    client = RegistryClient(address)
    try:
        if isinstance(value, Role):
            return await client.set_role(worker_id, value)
        return await client.set_draining(worker_id, value)
    finally:
        await client.close()

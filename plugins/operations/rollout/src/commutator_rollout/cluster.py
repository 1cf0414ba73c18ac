"""``commutator cluster``: the workers of all hosts, by the registry, without a front door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import click

from commutator.cli.options import Sources, configuration_options
from commutator.cli.serve import must_be_shared
from commutator.contract.worker import Role, WorkerRecord
from commutator.errors import CommutatorError
from commutator_rollout.cli import print_table

if TYPE_CHECKING:
    from commutator.contract.registry import Registry


_FIRST_VIEW_S = 10.0


@click.group(epilog="Example: commutator cluster ls cluster.yaml")
def cluster() -> None:
    """List the workers of all hosts; drain one, bring it back, change its role.

    These commands ask the registry that FILE names, with the certificate that FILE names, so they
    work while no front door does.
    """


def _ask(sources: Sources, question: Callable[[Registry], Awaitable[Any]]) -> Any:
    """Put a question to the registry of a configuration. Raises CommutatorError."""
    from commutator.supervisor.hosts import registry_client
    from commutator_rollout.member import as_member

    loaded = sources.load()
    must_be_shared(loaded.config, "only its own front doors know it (commutator worker ls)")

    async def ask() -> Any:
        registry = registry_client(loaded)
        try:
            return await question(registry)
        finally:
            await registry.close()

    with as_member(loaded.config):
        return asyncio.run(ask())


async def _workers(registry: Registry) -> list[WorkerRecord]:
    from commutator.contract.registry import WorkerUp
    from commutator.registry.claims import workers_only

    try:
        async with asyncio.timeout(_FIRST_VIEW_S):
            batch = await anext(workers_only(registry.watch()))
    except TimeoutError:
        problem = f"the registry did not answer within {_FIRST_VIEW_S:g} s"
        raise CommutatorError(problem) from None
    found = [change.record for change in batch if isinstance(change, WorkerUp)]
    return sorted(found, key=lambda record: record.worker_id)


@cluster.command(
    short_help="List workers with their hosts and addresses.",
    epilog="Example: commutator cluster ls cluster.yaml",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@configuration_options
def ls(sources: Sources, as_json: bool) -> None:
    """Print one line for each worker: its host, where it listens, and what it was started from.

    Workers of an engine with different generations were started from different options.
    """
    records: list[WorkerRecord] = _ask(sources, _workers)
    if as_json:
        click.echo(json.dumps([_row(one) for one in records], indent=2))
        return
    rows = [("WORKER", "HOST", "ADDRESS", "MODEL", "STATE", "GENERATION", "LABELS")]
    for one in records:
        role = "" if one.role is Role.BOTH else f"{one.role}, "
        labels = ",".join(f"{key}={value}" for key, value in sorted(one.labels.items()))
        state = f"{role}{'draining' if one.draining else 'ready'}"
        host = one.host or "-"
        rows.append(
            (one.worker_id, host, one.address, one.model, state, one.generation, labels or "-")
        )
    print_table(rows)


def _row(one: WorkerRecord) -> dict[str, Any]:
    return {
        "worker_id": one.worker_id,
        "host": one.host,
        "address": one.address,
        "model": one.model,
        "role": one.role.value,
        "state": "draining" if one.draining else "ready",
        "generation": one.generation,
        "labels": dict(one.labels),
    }


def _change(
    sources: Sources, worker_id: str, change: Callable[[Registry], Awaitable[bool]]
) -> None:
    if not _ask(sources, change):
        raise CommutatorError(f"no worker {worker_id!r}; see `commutator cluster ls`")


worker_argument = click.argument("worker_id", metavar="ID")


@cluster.command(epilog="Example: commutator cluster drain h1-reference-0 cluster.yaml")
@worker_argument
@configuration_options
def drain(worker_id: str, sources: Sources) -> None:
    """Stop sending requests to worker ID, also after a restart. It finishes those it has."""
    _change(sources, worker_id, lambda registry: registry.set_draining(worker_id, True))
    click.echo(f"{worker_id} gets no new requests")


@cluster.command(epilog="Example: commutator cluster undrain h1-reference-0 cluster.yaml")
@worker_argument
@configuration_options
def undrain(worker_id: str, sources: Sources) -> None:
    """Send requests to worker ID again."""
    _change(sources, worker_id, lambda registry: registry.set_draining(worker_id, False))
    click.echo(f"{worker_id} gets requests again")


@cluster.command(
    short_help="Make worker ID prefill, decode or do both.",
    epilog="Example: commutator cluster role h1-reference-0 prefill cluster.yaml",
)
@worker_argument
@click.argument("new_role", metavar="ROLE", type=click.Choice([role.value for role in Role]))
@configuration_options
def role(worker_id: str, new_role: str, sources: Sources) -> None:
    """Make worker ID a prefill worker, a decode worker, or one for both, at once.

    `commutator worker role` does so after draining it, if it can reach a front door.
    """
    wanted = Role(new_role)
    _change(sources, worker_id, lambda registry: registry.set_role(worker_id, wanted))
    click.echo(f"{worker_id} now has the role {new_role}")

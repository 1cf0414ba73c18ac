"""``commutator kv``: inspects and changes the storage tiers of a running deployment's workers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import click
import msgspec
from attrs import frozen

from commutator.cli.front_door import FrontDoor, front_door_options, prompt_options
from commutator.cli.kv_tables import show_contents, show_statistics, show_verified, show_why
from commutator.cli.options import NumberRange
from commutator.contract.worker import KvPrompt
from commutator.engine.client import TokenApiClient
from commutator.errors import CommutatorError, EngineError, EngineWithoutTiersError

__all__ = [
    "Workers",
    "find_workers",
    "kv",
]

AnswerT = TypeVar("AnswerT")
_TIMEOUT_S = 10.0


@frozen
class Workers:
    """The workers that a command asks, and the form in which it prints their answers."""

    door: FrontDoor
    worker_id: str | None
    """None: every worker."""
    as_json: bool

    def ask(
        self,
        question: Callable[[TokenApiClient], Awaitable[AnswerT]],
        show: Callable[[Mapping[str, AnswerT]], None],
        *,
        model: str | None = None,
    ) -> tuple[Mapping[str, AnswerT], bool]:
        """Print the answers; returns them, and whether every worker with tiers answered.

        Raises CommutatorError when no worker answers.
        """
        addresses = find_workers(self.door, self.worker_id, model)
        with self.door.joined():
            answers, problems = asyncio.run(_ask_all(addresses, question))
        for worker_id, problem in problems.items() if answers else ():
            click.echo(f"{worker_id}: {problem}", err=True)
        complete = all(isinstance(error, EngineWithoutTiersError) for error in problems.values())
        if not answers:
            if complete:
                raise CommutatorError("No tiers are configured. Add `tiers:` to your file.")
            lines = "\n".join(f"  {worker_id}: {error}" for worker_id, error in problems.items())
            raise CommutatorError(f"no worker answered the request about its tiers:\n{lines}")
        if self.as_json:
            click.echo(json.dumps(msgspec.to_builtins(answers), indent=2))
        else:
            show(answers)
        return answers, complete


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """``--worker``, ``--json`` and those of the front door; the command gets ``workers``."""

    @wraps(command)
    def with_workers(
        *args: Any, door: FrontDoor, worker_id: str | None, as_json: bool, **more: Any
    ) -> None:
        command(*args, workers=Workers(door, worker_id, as_json), **more)

    worker = click.option("--worker", "worker_id", metavar="ID", help="Ask this worker only.")
    form = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
    return front_door_options(worker(form(with_workers)))


_tier = click.option("--tier", metavar="NAME", help="This tier only, as `kv ls` names it.")


@click.group()
def kv() -> None:
    """Show and change the KV blocks in storage tiers.

    The commands ask the workers of a running deployment, on the machine where they run.
    """


@kv.command(epilog="Example: commutator kv ls")
@_common
def ls(workers: Workers) -> None:
    """Show blocks and bytes by worker and tier."""
    workers.ask(lambda client: client.kv_contents(timeout_s=_TIMEOUT_S), show_contents)


@kv.command(epilog="Example: commutator kv stats --json")
@_common
def stats(workers: Workers) -> None:
    """Show the counters of the tiers, with reasons."""
    workers.ask(lambda client: client.kv_statistics(timeout_s=_TIMEOUT_S), show_statistics)


@kv.command(
    short_help="Show which blocks of PROMPT would be reused.",
    epilog='Example: commutator kv why "Once upon a time"',
)
@prompt_options
@click.option("--cache-salt", metavar="SALT", help="The cache salt of the request.")
@_common
def why(
    prompt: str, model: str | None, chat: bool, cache_salt: str | None, workers: Workers
) -> None:
    """Show which blocks of PROMPT would be reused, from which tier, and why others would not."""
    body = workers.door.prompt(prompt, model, chat=chat)
    tokenized = workers.door.call("/tokenize", body)[1]
    question = KvPrompt(token_ids=tokenized["tokens"], cache_salt=cache_salt)
    workers.ask(
        lambda client: client.kv_explain(question, timeout_s=_TIMEOUT_S),
        show_why,
        model=body["model"],
    )


@kv.command(
    short_help="Remove the blocks of one tier, or of all.",
    epilog="Example: commutator kv evict --tier dram",
)
@_tier
@click.option("--all", "every", is_flag=True, help="Every tier.")
@_common
def evict(tier: str | None, every: bool, workers: Workers) -> None:
    """Remove the blocks of one tier or of all, durable and shared tiers included.

    A block that is being loaded is removed after the load. The engine's own memory is not a tier.
    The exit code is 1 when a worker with tiers did not remove them.
    """
    if (tier is None) != every:
        raise click.UsageError("give either --tier NAME or --all")

    def show(answers: Mapping[str, Mapping[str, int]]) -> None:
        for worker_id, counts in answers.items():
            removed = ", ".join(f"{blocks} blocks from {name}" for name, blocks in counts.items())
            click.echo(f"{worker_id}: removed {removed}")

    _, complete = workers.ask(lambda client: client.kv_evict(tier, timeout_s=_TIMEOUT_S), show)
    if not complete:
        sys.exit(1)


@kv.command(
    short_help="Read and check every stored block.",
    epilog="Example: commutator kv verify --tier nvme",
)
@_tier
@click.option(
    "--timeout",
    "timeout_s",
    type=NumberRange(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Wait at most this many seconds.",
)
@_common
def verify(tier: str | None, timeout_s: float, workers: Workers) -> None:
    """Read and check every stored block; a corrupt block is never used again.

    It runs beside serving, while a tier has nothing else to do. The exit code is 1 when a block was
    corrupt or could not be read, or when a worker with tiers did not check them.
    """
    answers, complete = workers.ask(
        lambda client: client.kv_verify(tier, timeout_s=timeout_s), show_verified
    )
    checks = [check for checks in answers.values() for check in checks]
    bad = any(check.corrupt or check.unreadable or check.problem for check in checks)
    if bad or not complete:
        sys.exit(1)


def find_workers(door: FrontDoor, worker_id: str | None, model: str | None) -> dict[str, str]:
    """The addresses of the workers of this machine, by worker id; None asks for all.

    Raises CommutatorError when there is none.
    """
    known = door.workers(worker_id)
    reachable = [worker for worker in known if worker["admin_address"] is not None]
    if not reachable:
        raise CommutatorError(
            f"none of the {len(known)} workers of {door.url} can be reached from here; "
            "run this command on the machine where they run"
        )
    found = {
        worker["worker_id"]: worker["admin_address"]
        for worker in reachable
        if model in (None, worker["model"])
    }
    if not found:
        raise CommutatorError(f"no worker on this machine serves {model}")
    return found


async def _ask_all(
    addresses: Mapping[str, str], question: Callable[[TokenApiClient], Awaitable[AnswerT]]
) -> tuple[dict[str, AnswerT], dict[str, EngineError]]:
    """The answers by worker id, and the errors of the other workers."""
    answers: dict[str, AnswerT] = {}
    problems: dict[str, EngineError] = {}

    async def ask(address: str) -> AnswerT | EngineError:
        client = TokenApiClient(address)
        try:
            return await question(client)
        except EngineError as error:
            return error
        finally:
            await client.close()

    found = await asyncio.gather(*map(ask, addresses.values()))
    for worker_id, answer in zip(addresses, found, strict=True):
        if isinstance(answer, EngineError):
            problems[worker_id] = answer
        else:
            answers[worker_id] = answer
    return answers, problems

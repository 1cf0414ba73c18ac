"""``commutator kv``: what the workers of a running deployment keep in storage tiers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from commutator.cli.kv_bench import bench
from commutator.cli.options import NumberRange, front_door_options
from commutator.cli.route import call, only_model
from commutator.errors import CommutatorError

__all__ = ["kv"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_worker = click.option("--worker", metavar="ID", help="Ask this worker only.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_tier = click.option("--tier", metavar="NAME", help="This tier only, as `kv ls` names it.")


def _common(command: CommandT) -> CommandT:
    return front_door_options(_worker(_json(command)))


@click.group()
def kv() -> None:
    """See and change what the workers keep in storage tiers.

    All but bench ask the workers of a running deployment, on the machine where they run.
    """


kv.add_command(bench)


@kv.command(epilog="Example: commutator kv ls")
@_common
def ls(url: str, api_key: str | None, worker: str | None, as_json: bool) -> None:
    """What is where: blocks and bytes, by worker and tier."""
    answers, _ = _ask(url, api_key, worker, "contents")
    if as_json:
        click.echo(json.dumps(answers, indent=2))
    else:
        from commutator.cli.kv_tables import show_contents

        show_contents(answers)


@kv.command(epilog="Example: commutator kv stats --json")
@_common
def stats(url: str, api_key: str | None, worker: str | None, as_json: bool) -> None:
    """Everything that is counted, by tier and by edge, with each reason."""
    answers, _ = _ask(url, api_key, worker, "statistics")
    if as_json:
        click.echo(json.dumps(answers, indent=2))
    else:
        from commutator.cli.kv_tables import show_statistics

        show_statistics(answers)


@kv.command(
    short_help="Which blocks of PROMPT would be reused, and why not the others.",
    epilog='Example: commutator kv why "Once upon a time"',
)
@click.argument("prompt")
@click.option("--model", help="The model; not needed when only one is served.")
@click.option("--chat", is_flag=True, help="The prompt is a user's message to the chat template.")
@click.option("--cache-salt", metavar="SALT", help="The tenant whose blocks count.")
@_common
def why(
    prompt: str,
    model: str | None,
    chat: bool,
    cache_salt: str | None,
    url: str,
    api_key: str | None,
    worker: str | None,
    as_json: bool,
) -> None:
    """Which blocks of PROMPT would be reused, from which tier, and why not the others."""
    model = model or only_model(url, api_key)
    body: dict[str, Any] = {"model": model}
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    _, tokenized = call(f"{url}/tokenize", api_key, body)
    question = {"token_ids": tokenized["tokens"], "cache_salt": cache_salt}
    answers, _ = _ask(url, api_key, worker, "why", question, model=model)
    if as_json:
        click.echo(json.dumps(answers, indent=2))
    else:
        from commutator.cli.kv_tables import show_why

        show_why(answers)


@kv.command(
    short_help="Remove the blocks of one tier, or of all.",
    epilog="Example: commutator kv evict --tier dram",
)
@_tier
@click.option("--all", "every", is_flag=True, help="Every tier.")
@_common
def evict(
    tier: str | None, every: bool, url: str, api_key: str | None, worker: str | None, as_json: bool
) -> None:
    """Remove the blocks of one tier or all, also durable and shared ones.

    What a load reads leaves once it was read. The engine's own memory is not a tier. Exit code 1
    when a worker that has tiers did not do it.
    """
    if (tier is None) != every:
        raise click.UsageError("give either --tier NAME or --all")
    answers, all_did = _ask(url, api_key, worker, "evict", {"tier": tier})
    if as_json:
        click.echo(json.dumps(answers, indent=2))
    else:
        for worker_id, counts in answers.items():
            told = ", ".join(f"{blocks} blocks from {name}" for name, blocks in counts.items())
            click.echo(f"{worker_id}: removed {told}")
    if not all_did:
        sys.exit(1)


@kv.command(
    short_help="Read every stored block again and check it.",
    epilog="Example: commutator kv verify --tier nvme",
)
@_tier
@click.option(
    "--timeout",
    "timeout_s",
    type=NumberRange(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Wait so many seconds.",
)
@_common
def verify(
    tier: str | None,
    timeout_s: float,
    url: str,
    api_key: str | None,
    worker: str | None,
    as_json: bool,
) -> None:
    """Read every stored block again and check it; a bad one is never used again.

    Goes on beside the serving, whenever a tier has nothing else to do. Exit code 1 when a block was
    bad or could not be read, or when a worker that has tiers did not do it.
    """
    answers, all_did = _ask(url, api_key, worker, "verify", {"tier": tier}, timeout_s=timeout_s)
    if as_json:
        click.echo(json.dumps(answers, indent=2))
    else:
        from commutator.cli.kv_tables import show_verified

        show_verified(answers)
    checks = [check for checks in answers.values() for check in checks]
    bad = any(check["corrupt"] or check["unreadable"] or check["problem"] for check in checks)
    if bad or not all_did:
        sys.exit(1)


def _ask(
    url: str,
    api_key: str | None,
    worker: str | None,
    what: str,
    arguments: dict[str, Any] | None = None,
    *,
    timeout_s: float = 10.0,
    model: str | None = None,
) -> tuple[dict[str, Any], bool]:
    """The answers by worker, and whether every worker that has tiers gave one."""
    from commutator.cli.kv_workers import ask_tiers, find_workers
    from commutator.engine.contract import NO_TIERS

    workers = find_workers(url, api_key, worker)
    asked = [found for found in workers if model in (None, found.model)]
    if not asked:
        raise CommutatorError(f"no worker here serves {model}")
    answers, problems = ask_tiers(asked, what, arguments, timeout_s=timeout_s)
    for worker_id, problem in problems.items():
        click.echo(f"{worker_id}: {problem}", err=True)
    return answers, all(problem == NO_TIERS for problem in problems.values())

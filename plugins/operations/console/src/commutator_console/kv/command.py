"""``commutator kv``: inspects and changes the storage tiers of a running deployment's workers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import click
import msgspec
from attrs import frozen

from commutator.cli.front_door import FrontDoor, front_door_options
from commutator.cli.options import NumberRange
from commutator.contract.worker import (
    KvStatistics,
    PromptExplanation,
    TierContents,
    TierVerification,
)
from commutator.errors import CommutatorError
from commutator_console.door import prompt_body, prompt_options
from commutator_console.kv.tables import show_contents, show_statistics, show_verified, show_why

__all__ = ["Workers", "kv"]

AnswerT = TypeVar("AnswerT")
_LONGER_S = 60.0
"""The front door waits for workers itself; its answer may take this much longer."""


@frozen
class Workers:
    """The workers that a command asks, and the form in which it prints their answers."""

    door: FrontDoor
    worker_id: str | None
    """None: every worker."""
    as_json: bool

    def ask(
        self,
        method: Literal["GET", "POST"],
        path: str,
        answer_type: type[AnswerT],
        show: Callable[[Mapping[str, AnswerT]], None],
        *,
        body: dict[str, Any] | None = None,
        **query: str | float | None,
    ) -> tuple[Mapping[str, AnswerT], bool]:
        """Print the answers; returns them, and whether every worker with tiers answered.

        ``query`` goes into the URL, without what is None. Raises CommutatorError when no worker
        answers.
        """
        if self.worker_id is not None:
            self.door.workers(self.worker_id)  # names the others when there is none
        given = {"worker": self.worker_id, **query}
        asked = urlencode({name: value for name, value in given.items() if value is not None})
        patience_s = _LONGER_S + float(query.get("timeout_s") or 0)
        found = self.door.administer(
            method, f"{path}?{asked}" if asked else path, body, timeout_s=patience_s
        )
        answers = {
            worker_id: msgspec.convert(answer, answer_type)
            for worker_id, answer in found["answers"].items()
        }
        problems = found["problems"]
        for worker_id, problem in problems.items() if answers else ():
            click.echo(f"{worker_id}: {problem['message']}", err=True)
        complete = all(problem["without_tiers"] for problem in problems.values())
        if not answers:
            if complete:
                raise CommutatorError("No tiers are configured. Add `tiers:` to your file.")
            lines = "\n".join(f"  {one}: {problem['message']}" for one, problem in problems.items())
            raise CommutatorError(f"the request failed at every worker:\n{lines}")
        if self.as_json:
            click.echo(json.dumps(found["answers"], indent=2))
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

    The commands ask the workers of a running deployment, through a front door.
    """


@kv.command(epilog="Example: commutator kv ls")
@_common
def ls(workers: Workers) -> None:
    """Show blocks and bytes by worker and tier."""
    workers.ask("GET", "/admin/tiers", list[TierContents], show_contents)


@kv.command(epilog="Example: commutator kv stats --json")
@_common
def stats(workers: Workers) -> None:
    """Show the counters of the tiers, with reasons."""
    workers.ask("GET", "/admin/tiers/statistics", KvStatistics, show_statistics)


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
    body = prompt_body(workers.door, prompt, model, chat=chat)
    tokenized = workers.door.call("/tokenize", body)[1]
    question = {"token_ids": tokenized["tokens"], "cache_salt": cache_salt}
    workers.ask(
        "POST",
        "/admin/tiers/explain",
        PromptExplanation,
        show_why,
        body=question,
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

    _, complete = workers.ask("POST", "/admin/tiers/evict", dict[str, int], show, tier=tier)
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
        "POST",
        "/admin/tiers/verify",
        list[TierVerification],
        show_verified,
        tier=tier,
        timeout_s=timeout_s,
    )
    checks = [check for checks in answers.values() for check in checks]
    bad = any(check.corrupt or check.unreadable or check.problem for check in checks)
    if bad or not complete:
        sys.exit(1)

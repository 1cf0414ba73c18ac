"""``commutator kv``: inspects and changes the storage tiers of a running deployment's workers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import groupby
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import click
import msgspec
from attrs import frozen
from rich.console import Console
from rich.table import Table
from rich.text import Text

from commutator.cli.options import NumberRange
from commutator.contract.worker import (
    BlockExplanation,
    HeldBlock,
    KvStatistics,
    PromptExplanation,
    TierContents,
    TierState,
    TierVerification,
)
from commutator.errors import CommutatorError
from commutator_console.door import prompt_body, prompt_options
from commutator_console.front_door import FrontDoor, front_door_options

AnswerT = TypeVar("AnswerT")
_LONGER_S = 60.0
"""The front door waits for workers itself; its answer may take this much longer."""
_STEP = 1000
_MOST = 1 << 62


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


# --------------------------------------------------------------------------- tables


def show_contents(answers: Mapping[str, Sequence[TierContents]]) -> None:
    """``kv ls``."""
    table = _table("worker", "tier", "medium", "state", "blocks>", "pinned>", "size>", "capacity>")
    for worker, tiers in answers.items():
        for tier in tiers:
            _add_row(
                table,
                worker,
                tier.tier,
                tier.medium,
                "up" if tier.up else Text("down", "red"),
                str(tier.blocks),
                str(tier.pinned),
                "?" if tier.bytes is None else _human_bytes(tier.bytes),
                _capacity(tier),
            )
    Console().print(table)


def _capacity(tier: TierContents) -> str:
    if tier.capacity_blocks is not None:
        return f"{tier.capacity_blocks} blocks"
    return "no limit" if tier.up else "?"


def show_statistics(answers: Mapping[str, KvStatistics]) -> None:
    """``kv stats``."""
    loads = _table("worker", "tier", "blocks>", "loaded>", "not loaded", "removed", "speed")
    stores = _table("worker", "from", "to", "stored>", "not admitted", "failed")
    for worker, counts in answers.items():
        for tier in counts.tiers:
            outcomes = dict(tier.loads)
            loaded = outcomes.pop("loaded", 0)
            missed = outcomes | dict(tier.not_loaded)
            _add_row(
                loads,
                worker,
                tier.name if tier.up else Text.assemble(tier.name, (" (down)", "red")),
                _room(tier),
                str(loaded),
                _reasons(missed),
                _reasons(tier.removed),
                _speed(tier),
            )
        for edge in counts.edges:
            _add_row(
                stores,
                worker,
                edge.source,
                edge.target,
                str(edge.stored),
                _reasons(edge.not_admitted),
                _reasons(edge.failed),
            )
    console = Console()
    console.print("Out of the tiers", style="bold")
    console.print(loads)
    console.print("Into the tiers", style="bold")
    console.print(stores)
    console.print("KV of one sequence, on each rank", style="bold")
    console.print(_sequence_bytes(answers))


def _sequence_bytes(answers: Mapping[str, KvStatistics]) -> Table:
    table = _table("worker", "layers", "each token>", "at most>")
    for worker, counts in answers.items():
        for layers, (token, most) in counts.sequence_bytes.items():
            limit = _human_bytes(most) if most else "no limit"
            _add_row(table, worker, layers, _human_bytes(token) if token else "0 B", limit)
    return table


def show_verified(answers: Mapping[str, Sequence[TierVerification]]) -> None:
    """``kv verify``."""
    columns = ("blocks>", "intact>", "corrupt>", "gone>", "unreadable>", "read>", "took>")
    table = _table("worker", "tier", *columns)
    problems = []
    for worker, checks in answers.items():
        for check in checks:
            corrupt = check.corrupt
            _add_row(
                table,
                worker,
                check.tier,
                str(check.blocks),
                str(check.intact),
                Text(str(corrupt), "red") if corrupt else "0",
                str(check.gone),
                str(check.unreadable),
                _human_bytes(check.bytes),
                f"{check.seconds:.2f} s",
            )
            if check.problem:
                problems.append(f"{worker}, {check.tier}: {check.problem}")
    console = Console()
    console.print(table)
    for problem in problems:
        console.print(Text(problem, "red"))


def show_why(answers: Mapping[str, PromptExplanation]) -> None:
    """``kv why``."""
    console = Console()
    for worker, answer in answers.items():
        blocks, size = answer.blocks, answer.block_size
        tokens = answer.prompt_tokens
        line = Text.assemble((worker, "bold"), f": {_plural(tokens, 'token')}")
        if not blocks:
            line.append(
                ". Nothing can be reused: blocks are reused whole, a block has "
                f"{_plural(size, 'token')}, and the last token is always computed, so a prompt "
                f"must have at least {_plural(size + 1, 'token')}"
            )
            console.print(line)
            continue
        reused, rest = sum(block.reusable for block in blocks), tokens - len(blocks) * size
        remainder = "last token is" if rest == 1 else f"last {rest} tokens are"
        line.append(
            f", {reused} of {_plural(len(blocks), 'block')} would be reused; "
            f"the {remainder} always computed"
        )
        console.print(line)
        table = _table("blocks>", "reused", "why", "in")
        for first, last, block in _runs(blocks):
            numbers = str(first) if first == last else f"{first}-{last}"
            mark = Text("yes", "green") if block.reusable else "no"
            held = ", ".join(f"{copy.name}{_state(copy)}" for copy in block.held)
            _add_row(table, numbers, mark, block.reason, held)
        console.print(table)


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _runs(blocks: Sequence[BlockExplanation]) -> Iterator[tuple[int, int, BlockExplanation]]:
    """(first, last, block) of consecutive blocks with the same explanation."""
    numbered = list(enumerate(blocks))
    for _, group in groupby(
        numbered, key=lambda each: (each[1].reusable, each[1].reason, each[1].held)
    ):
        run = list(group)
        yield run[0][0], run[-1][0], run[0][1]


def _state(copy: HeldBlock) -> str:
    about = "" if copy.state == "published" else copy.state
    notes = ", ".join(filter(None, (about, copy.note)))
    return f" ({notes})" if notes else ""


def _room(tier: TierState) -> str:
    capacity = tier.capacity
    return str(tier.published) if capacity > _MOST else f"{tier.published} of {capacity}"


def _speed(tier: TierState) -> str:
    if tier.block_s is None or tier.latency_s is None:
        return "not measured"
    return f"{tier.latency_s * 1e3:.2f} ms + {tier.block_s * 1e3:.3f} ms a block"


def _reasons(counts: Mapping[str, int]) -> str:
    return "\n".join(f"{count} {reason}" for reason, count in sorted(counts.items()) if count)


def _table(*columns: str) -> Table:
    """A table without lines. A name that ends in ">" is a right-aligned column."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left")
    return table


def _add_row(table: Table, *cells: str | Text) -> None:
    """Add a row. Text from workers is shown literally, also where it looks like Rich's markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def _human_bytes(size: float) -> str:
    """Such as "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < _STEP:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= _STEP
    return f"{size:.1f} TB"

"""The tables of ``commutator kv``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from commutator.contract.worker import (
    BlockExplanation,
    HeldBlock,
    KvStatistics,
    PromptExplanation,
    TierContents,
    TierState,
    TierVerification,
)

__all__ = [
    "add_row",
    "human_bytes",
    "make_table",
    "show_contents",
    "show_statistics",
    "show_verified",
    "show_why",
]

_STEP = 1000
_MOST = 1 << 62


def show_contents(answers: Mapping[str, Sequence[TierContents]]) -> None:
    """``kv ls``."""
    table = make_table(
        "worker", "tier", "medium", "state", "blocks>", "pinned>", "size>", "capacity>"
    )
    for worker, tiers in answers.items():
        for tier in tiers:
            add_row(
                table,
                worker,
                tier.tier,
                tier.medium,
                "up" if tier.up else Text("down", "red"),
                str(tier.blocks),
                str(tier.pinned),
                "?" if tier.bytes is None else human_bytes(tier.bytes),
                _capacity(tier),
            )
    Console().print(table)


def _capacity(tier: TierContents) -> str:
    if tier.capacity_blocks is not None:
        return f"{tier.capacity_blocks} blocks"
    return "no limit" if tier.up else "?"


def show_statistics(answers: Mapping[str, KvStatistics]) -> None:
    """``kv stats``."""
    loads = make_table("worker", "tier", "blocks>", "loaded>", "not loaded", "removed", "speed")
    stores = make_table("worker", "from", "to", "stored>", "not admitted", "failed")
    for worker, counts in answers.items():
        for tier in counts.tiers:
            outcomes = dict(tier.loads)
            loaded = outcomes.pop("loaded", 0)
            missed = outcomes | dict(tier.not_loaded)
            add_row(
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
            add_row(
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


def show_verified(answers: Mapping[str, Sequence[TierVerification]]) -> None:
    """``kv verify``."""
    columns = ("blocks>", "intact>", "corrupt>", "gone>", "unreadable>", "read>", "took>")
    table = make_table("worker", "tier", *columns)
    problems = []
    for worker, checks in answers.items():
        for check in checks:
            corrupt = check.corrupt
            add_row(
                table,
                worker,
                check.tier,
                str(check.blocks),
                str(check.intact),
                Text(str(corrupt), "red") if corrupt else "0",
                str(check.gone),
                str(check.unreadable),
                human_bytes(check.bytes),
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
        table = make_table("blocks>", "reused", "why", "in")
        for first, last, block in _runs(blocks):
            numbers = str(first) if first == last else f"{first}-{last}"
            mark = Text("yes", "green") if block.reusable else "no"
            held = ", ".join(f"{copy.name}{_state(copy)}" for copy in block.held)
            add_row(table, numbers, mark, block.reason, held)
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


def make_table(*columns: str) -> Table:
    """A table without lines. A name that ends in ">" is a right-aligned column."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """Add a row. Text from workers is shown literally, also where it looks like Rich's markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def human_bytes(size: float) -> str:
    """Such as "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < _STEP:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= _STEP
    return f"{size:.1f} TB"

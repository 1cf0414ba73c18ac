"""Options and tables that the commands over a trace share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.table import Table
from rich.text import Text

from commutator.cli.options import NumberRange, set_option

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def trace_options(command: CommandT) -> CommandT:
    """TRACE and FILE, which part of TRACE is replayed, and ``--set``."""
    options = (
        click.argument("trace", type=_FILE),
        click.argument("file", type=_FILE),
        click.option(
            "--requests", type=click.IntRange(1), help="Only this many of the trace's requests."
        ),
        click.option(
            "--thin",
            type=NumberRange(min=1),
            default=1.0,
            show_default=True,
            help="Keep one in this many requests, drawn; of a table of rates, draw as many fewer.",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="For ties and draws."),
        set_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def table(title: str, first: str, *others: str) -> Table:
    """A table without a box, whose ``others`` are columns of numbers."""
    made = Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left")
    made.add_column(Text(first), no_wrap=True)
    for column in others:
        made.add_column(Text(column), justify="right", no_wrap=True)
    return made

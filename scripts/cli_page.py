"""Writes ``docs/reference/cli.md``: the help of every command that the parser knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner

from commutator.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "cli.md"

_WIDTH = 80
HEAD = """# Commands

Generated from the command line's own help (`make docs`).

```console
"""
TAIL = """```

Exit codes: 0 done, 1 the configuration or a plugin is wrong, 2 the command line is wrong.
"""


def commands() -> list[tuple[str, ...]]:
    """Every command as its words after ``commutator``, groups before what they hold."""
    return list(_below(main, click.Context(main), ()))


def _below(
    command: click.Command, context: click.Context, words: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    yield words
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, f"{name} is listed but not there"
            yield from _below(inner, click.Context(inner, context), (*words, name))


def page() -> str:
    return HEAD + "".join(map(_block, commands())) + TAIL


def _block(words: tuple[str, ...]) -> str:
    done = CliRunner().invoke(
        main, [*words, "--help"], prog_name="commutator", terminal_width=_WIDTH - 2
    )
    lines = [" ".join(("$ commutator", *words, "--help")), *done.output.splitlines()]
    return "".join(line.rstrip() + "\n" for line in lines)


def write() -> None:
    PAGE.write_text(page())

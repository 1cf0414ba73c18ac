"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = [
    "DEFAULT_FILE",
    "NumberRange",
    "files_argument",
    "no_plugin_option",
    "override_options",
    "set_option",
]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """A range that also refuses "nan", which click accepts in any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


DEFAULT_FILE = "commutator.yaml"
"""What `commutator init` writes; commands that take FILE read it if none is named."""


def _files(ctx: click.Context, param: click.Parameter, files: tuple[Path, ...]) -> tuple[Path, ...]:
    default = Path(DEFAULT_FILE)
    if files or ctx.resilient_parsing:
        return files
    if not default.is_file():
        raise click.MissingParameter(
            f"There is no {default} here either; `commutator init` writes one.", ctx, param
        )
    return (default,)


files_argument = click.argument(
    "files",
    metavar="[FILE]...",
    nargs=-1,
    callback=_files,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)

no_plugin_option = click.option(
    "--no-plugin",
    "no_plugins",
    metavar="NAME",
    multiple=True,
    help="Do not load this plugin. May be repeated.",
)

set_option = click.option(
    "--set",
    "sets",
    metavar="PATH=VALUE",
    multiple=True,
    help="Set one value, such as 'engines[0].replicas=3'. May be repeated.",
)


def override_options(command: CommandT) -> CommandT:
    """``--set`` and ``--no-plugin``."""
    return set_option(no_plugin_option(command))

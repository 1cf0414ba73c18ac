"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import frozen

if TYPE_CHECKING:
    from commutator.config.load import Loaded


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


_files_argument = click.argument(
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


@frozen
class Sources:
    """Where the configuration of a command comes from."""

    files: tuple[Path, ...]
    """Later ones override earlier ones."""
    sets: tuple[str, ...]
    no_plugins: tuple[str, ...]

    def load(self, **more: Any) -> Loaded:
        """As ``load_config``, which takes ``more``."""
        from commutator.config.load import load_config

        return load_config(self.files, sets=self.sets, no_plugins=self.no_plugins, **more)


def configuration_options(command: Callable[..., None]) -> Callable[..., None]:
    """The argument FILE..., ``--set`` and ``--no-plugin``; the command gets ``sources``."""

    @wraps(command)
    def with_sources(
        *args: Any,
        files: tuple[Path, ...],
        sets: tuple[str, ...],
        no_plugins: tuple[str, ...],
        **more: Any,
    ) -> None:
        command(*args, sources=Sources(files, sets, no_plugins), **more)

    return _files_argument(set_option(no_plugin_option(with_sources)))

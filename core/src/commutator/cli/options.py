"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = [
    "NumberRange",
    "files_argument",
    "front_door_options",
    "no_plugin_option",
    "override_options",
    "set_option",
]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """A range that also refuses "nan": as it is neither below nor above, click lets it in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


files_argument = click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
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
    help="Set one value, such as engines[0].replicas=3. May be repeated.",
)


def override_options(command: CommandT) -> CommandT:
    """``--set`` and ``--no-plugin``."""
    return set_option(no_plugin_option(command))


def front_door_options(command: CommandT) -> CommandT:
    """``--url``, without a slash at the end, and ``--api-key``."""
    url = click.option(
        "--url",
        default="http://127.0.0.1:8000",
        show_default=True,
        callback=_front_door,
        help="The front door.",
    )
    key = click.option(
        "--api-key", envvar="COMMUTATOR_API_KEY", help="Bearer token, if one is needed."
    )
    return url(key(command))


def _front_door(_context: click.Context, _option: click.Parameter, url: str) -> str:
    """``url`` may also be the one that clients are given."""
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"expected http://HOST:PORT, got {url}")
    return url.rstrip("/").removesuffix("/v1")

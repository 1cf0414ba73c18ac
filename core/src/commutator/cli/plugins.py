"""``commutator plugins``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from commutator.cli.options import no_plugin_option

if TYPE_CHECKING:
    from commutator.plugins import Installed

__all__ = ["plugins"]


@click.command(epilog="Example: commutator plugins --json")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array instead of a table.")
@no_plugin_option
def plugins(as_json: bool, no_plugins: tuple[str, ...]) -> None:
    """List the installed plugins: what each offers, or why it is not loaded."""
    from commutator.plugins import load_plugins  # noqa: PLC0415 - keeps --help quick

    installed = load_plugins(no_plugins).installed
    if as_json:
        click.echo(json.dumps([_fields(plugin) for plugin in installed], indent=2))
    else:
        _print_table(installed)


def _fields(plugin: Installed) -> dict[str, object]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "kinds": plugin.kinds,
        "hooks": list(plugin.hooks),
        "problem": plugin.problem,
    }


def _print_table(installed: list[Installed]) -> None:
    from rich.console import Console  # noqa: PLC0415 - keeps --help quick
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("plugin", "distribution", "offers", "hooks"):
        table.add_column(column, overflow="fold", no_wrap=column == "plugin")
    for plugin in installed:
        offers = "\n".join(plugin.kinds)
        if plugin.problem is not None:
            offers = f"not loaded: {plugin.problem}"
        table.add_row(
            plugin.name,
            f"{plugin.distribution} {plugin.version}",
            offers,
            "\n".join(plugin.hooks),
            style="red" if plugin.problem is not None else None,
        )
    console = Console(highlight=False, markup=False)
    if installed:
        console.print(table)
    else:
        console.print("No plugin is installed. Try: pip install commutator-reference")

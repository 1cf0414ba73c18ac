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
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array instead of a list.")
@no_plugin_option
def plugins(as_json: bool, no_plugins: tuple[str, ...]) -> None:
    """List the installed plugins with their kinds and hooks, or why one is not loaded."""
    from commutator.cli.added import AddedCommands
    from commutator.cli.main import COMMANDS
    from commutator.plugins import load_plugins

    installed = load_plugins(no_plugins).installed
    refused = AddedCommands(own=COMMANDS).refused
    for plugin in installed:
        if theirs := [one.name for one in plugin.commands if one.name in refused]:
            plugin.problem = "; ".join(refused[name] for name in theirs)
            plugin.commands = tuple(one for one in plugin.commands if one.name not in refused)
    if as_json:
        click.echo(json.dumps([_fields(plugin) for plugin in installed], indent=2))
    else:
        _print_list(installed)


def _fields(plugin: Installed) -> dict[str, object]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "kinds": [
            {"seam": kind.seam, "kind": kind.name, "stability": kind.stability}
            for kind in plugin.kinds
        ],
        "commands": [command.name for command in plugin.commands],
        "hooks": list(plugin.hooks),
        "problem": plugin.problem,
    }


def _print_list(installed: list[Installed]) -> None:
    if not any(plugin.kinds for plugin in installed if plugin.name != "builtin"):
        click.echo("No plugin is installed. In a checkout: pip install ./plugins/engines/reference")
    for plugin in installed:
        hooks = ", ".join(plugin.hooks) or "no hooks"
        name = click.style(plugin.name, bold=True)
        click.echo(f"{name}  {plugin.distribution} {plugin.version}  [{hooks}]")
        for kind in plugin.kinds:
            click.echo(f"    {kind}")
        for command in plugin.commands:
            click.echo(f"    command {command.name}")
        if plugin.problem is not None:
            click.secho(f"    not loaded: {plugin.problem}", fg="red")

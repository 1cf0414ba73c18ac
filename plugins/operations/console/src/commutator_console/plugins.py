"""``commutator plugins``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from commutator.cli.options import no_plugin_option
from commutator.errors import PluginError

if TYPE_CHECKING:
    from commutator.cli.added import CommandModule
    from commutator.plugins import Installed


@click.command(epilog="Example: commutator plugins --json")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array instead of a list.")
@no_plugin_option
def plugins(as_json: bool, no_plugins: tuple[str, ...]) -> None:
    """List the installed plugins with their kinds and hooks, or why one is not loaded."""
    from commutator.cli.added import AddedCommands
    from commutator.cli.main import COMMANDS
    from commutator.plugins import load_plugins

    installed = load_plugins(no_plugins).installed
    modules = AddedCommands(own=COMMANDS).modules
    rows = [*map(_row, installed), *map(_row_of_commands, modules)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not any(plugin.kinds for plugin in installed if plugin.name != "builtin"):
        click.echo("No plugin is installed. In a checkout: pip install ./plugins/engines/reference")
    for row in rows:
        _print(row)


def _row(plugin: Installed) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "kinds": [
            {"seam": kind.seam, "kind": kind.name, "stability": kind.stability}
            for kind in plugin.kinds
        ],
        "commands": [],
        "hooks": list(plugin.hooks),
        "problem": plugin.problem,
    }


def _row_of_commands(module: CommandModule) -> dict[str, Any]:
    from commutator.plugins import check_contract, describe

    installed = describe(module.point)
    try:
        check_contract(module.point.dist, installed)
    except PluginError as error:
        installed.problem = error.message
        return _row(installed)
    if module.commands:
        installed.hooks = ("command_register",)
    installed.problem = module.problem
    return {**_row(installed), "commands": module.commands}


def _print(row: dict[str, Any]) -> None:
    hooks = ", ".join(row["hooks"]) or "no hooks"
    name = click.style(row["name"], bold=True)
    click.echo(f"{name}  {row['distribution']} {row['version']}  [{hooks}]")
    for kind in row["kinds"]:
        click.echo(f"    {kind['seam']} {kind['kind']} ({kind['stability']})")
    for command in row["commands"]:
        click.echo(f"    command {command}")
    if row["problem"] is not None:
        click.secho(f"    not loaded: {row['problem']}", fg="red")

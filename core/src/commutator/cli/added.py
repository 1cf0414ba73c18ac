"""The commands that other distributions add, and the packages that bring those we know."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.metadata import EntryPoint, distributions
from typing import TYPE_CHECKING

import click

from commutator.contract.commands import Command, CommandRegister
from commutator.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PACKAGES", "AddedCommands"]

GROUP = "commutator.commands"
"""Entry-point group of the modules that implement the hook ``command_register``."""

PACKAGES = {
    "certs": "commutator-certs",
    "demo": "commutator-scaffold",
    "init": "commutator-scaffold",
    "kv": "commutator-console",
    "new-plugin": "commutator-scaffold",
    "planner": "commutator-slo",
    "planner search": "commutator-replay",
    "replay": "commutator-replay",
    "route": "commutator-console",
    "top": "commutator-console",
}
"""Commands of our other packages; an error names the package to install."""


class AddedCommands:
    """What plugins add to ``commutator``, or to one of its groups of commands."""

    def __init__(self, group: str = "", own: Collection[str] = ()) -> None:
        """Of ``group``, by its word after ``commutator``, which has the commands ``own`` itself."""
        self._prefix = f"{group} " if group else ""
        found: dict[str, Command] = {}
        self.problems: list[PluginError] = []
        """Why commands of a distribution are not here."""
        points = {*entry_points(group=GROUP)}
        for point in sorted(points, key=lambda point: (point.name, point.value)):
            try:
                found = _with_commands_of(point, found)
            except PluginError as error:
                self.problems.append(error)
        self.refused = {
            name: f'command "{name}": {why}'
            for name in found
            if (why := self._refusal(name, own, found))
        }
        """Why commands that were registered are not here, by their names."""
        for name, text in self.refused.items():
            self.problems.append(PluginError(found.pop(name).distribution, text))
        self.commands: Mapping[str, Command] = {
            name.removeprefix(self._prefix): command
            for name, command in sorted(found.items())
            if name.startswith(self._prefix) and " " not in name.removeprefix(self._prefix)
        }
        """By the word that the user types; without those of other groups."""

    def _refusal(self, name: str, own: Collection[str], found: Collection[str]) -> str | None:
        if name.startswith(self._prefix) and name.removeprefix(self._prefix) in own:
            return "commutator itself has it; choose another name"
        group, _, inside = name.partition(" ")
        if self._prefix or not inside or (group not in own and group in {*found, *PACKAGES}):
            return None
        if group in own:
            return f"{group} takes no commands of others; choose another name"
        return f'there is no group {group}; register "{group}" alone, with a click.Group'

    def load(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command ``name``; None where there is none.

        Raises UsageError that says which package to install where one of ours has it, and
        PluginError where it cannot be imported.
        """
        command = self.commands.get(name)
        if command is not None:
            return _loaded(command)
        if (package := PACKAGES.get(self._prefix + name)) is not None:
            if not self.problems:
                raise click.UsageError(f"{name} comes with {package}: pip install {package}", ctx)
            raise next(
                (one for one in self.problems if one.distribution == package), self.problems[0]
            )
        return None


def entry_points(group: str) -> Iterator[EntryPoint]:
    """Those of the group. Files that do not name it are not parsed, so the help comes sooner."""
    for distribution in distributions():
        if f"[{group}]" in (distribution.read_text("entry_points.txt") or ""):
            yield from distribution.entry_points.select(group=group)


def _with_commands_of(point: EntryPoint, found: dict[str, Command]) -> dict[str, Command]:
    """``found`` and what a module registers; all of it or, with a PluginError, nothing."""
    who = point.value if point.dist is None else point.dist.name
    together = dict(found)
    try:
        hook = getattr(point.load(), "command_register", None)
        marked = hook is not None and hasattr(hook, "commutator_impl")
        if hook is not None and marked:
            hook(register=CommandRegister(together, who))
    except PluginError:
        raise
    except Exception as error:
        text = f"commands of {point.value} cannot be listed: {type(error).__name__}: {error}"
        raise PluginError(who, text) from error
    if not marked:
        text = (
            f"{point.value} is in the entry-point group {GROUP}: define command_register in it, "
            "marked by commutator.hookimpl"
        )
        raise PluginError(who, text)
    return together


def _loaded(command: Command) -> click.Command:
    try:
        loaded = command.load()
    except Exception as error:
        text = f"command {command.name} cannot be imported: {error!r}"
        raise PluginError(command.distribution, text) from error
    if not isinstance(loaded, click.Command):
        text = f"command {command.name}: expected a click.Command, got {type(loaded).__name__}"
        raise PluginError(command.distribution, text)
    return loaded

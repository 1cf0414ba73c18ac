"""The commands that other distributions add, and the packages that bring those we know."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.metadata import EntryPoint, distributions
from typing import TYPE_CHECKING, NamedTuple

import click

from commutator.contract.commands import Command, CommandRegister
from commutator.errors import PluginError, packages

if TYPE_CHECKING:
    from collections.abc import Mapping


GROUP = "commutator.commands"
"""Entry-point group of the modules that implement the hook ``command_register``."""

_MARK = "commutator_impl"
"""What ``commutator.hookimpl`` adds to a function."""

PACKAGES = packages("commands")
"""Commands of our other packages; an error names the package to install."""


class CommandModule(NamedTuple):
    """An entry point of ``GROUP``."""

    point: EntryPoint
    commands: list[str]
    """The names of those that it adds."""
    problem: str | None
    """Why it adds none, or not all that it registered."""


class AddedCommands:
    """What plugins add to ``commutator``, or to one of its groups of commands."""

    def __init__(self, group: str = "", own: Collection[str] = ()) -> None:
        """Of ``group``, by its word after ``commutator``, which has the commands ``own`` itself."""
        self._prefix = f"{group} " if group else ""
        found: dict[str, Command] = {}
        self.problems: list[PluginError] = []
        """Why commands of a distribution are not here."""
        modules: list[CommandModule] = []
        points = {*entry_points(group=GROUP)}
        for point in sorted(points, key=lambda point: (point.name, point.value)):
            try:
                together = _with_commands_of(point, found)
            except PluginError as error:
                self.problems.append(error)
                modules.append(CommandModule(point, [], error.message))
            else:
                names = [name for name in together if name not in found]
                modules.append(CommandModule(point, names, None))
                found = together
        refused = {
            name: f'command "{name}": {why}'
            for name in found
            if (why := self._refusal(name, own, found))
        }
        for name, text in refused.items():
            self.problems.append(PluginError(found.pop(name).distribution, text))
        self.modules = [
            CommandModule(
                point,
                [name for name in names if name not in refused],
                problem or "; ".join(refused[name] for name in names if name in refused) or None,
            )
            for point, names, problem in modules
        ]
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
        module = point.load()
        marked = [name for name, member in vars(module).items() if hasattr(member, _MARK)]
        if marked == ["command_register"]:
            module.command_register(register=CommandRegister(together, who))
    except PluginError:
        raise
    except Exception as error:
        text = f"commands of {point.value} cannot be listed: {type(error).__name__}: {error}"
        raise PluginError(who, text) from error
    if marked != ["command_register"]:
        text = (
            f"{point.value} is in the entry-point group {GROUP}: define command_register in it, "
            "marked by commutator.hookimpl, and no other hook"
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

"""Commands: what a plugin adds to the command line, and is imported for only when it is used."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from commutator.errors import PluginError

__all__ = ["Command", "CommandRegister"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*( [a-z][a-z0-9]*(-[a-z0-9]+)*)?")


class Command(NamedTuple):
    """One command that a plugin adds."""

    name: str
    """Its word after ``commutator``, or two for a command of a group: "planner search"."""
    help: str
    """One line for ``commutator --help``, such as "Replay recorded traffic."."""
    load: Callable[[], Any]
    """Imports the command and returns it, a ``click.Command``."""
    distribution: str
    """The name of the installed package that brings it."""


class CommandRegister:
    """The argument of the hook ``command_register``: a plugin calls it once for each command."""

    def __init__(self, commands: dict[str, Command], distribution: str) -> None:
        """``commands`` by name is what it adds to, on behalf of ``distribution``."""
        self._commands = commands
        self._distribution = distribution

    def __call__(self, name: str, help: str, load: Callable[[], Any]) -> None:  # noqa: A002 - click's own name for it
        """Add the command ``name``, which ``help`` says in one line.

        ``name`` is one word, such as "replay", or the word of a group of commands and another one,
        such as "planner search". ``load()`` imports and returns the ``click.Command``; it is called
        only when the command is used. Raises PluginError when one of them breaks the contract or
        another plugin has the name.
        """
        if problem := self._problem(name, help, load):
            raise PluginError(self._distribution, f'command "{name}": {problem}')
        self._commands[name] = Command(name, help, load, self._distribution)

    def _problem(self, name: Any, help_: Any, load: Any) -> str | None:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            return "a name is a word such as new-plugin, or a group's and its own: planner search"
        if not isinstance(help_, str) or not help_.strip() or "\n" in help_:
            return f"its help must be one line, not {help_!r}"
        if not callable(load):
            return (
                f"expected a function that returns the click.Command, got {type(load).__name__}: "
                "import the command in it, so that nothing is imported for the others"
            )
        if (other := self._commands.get(name)) is not None:
            return f"already registered by {other.distribution}; uninstall one of the two"
        return None

"""The commands of this package; each is imported when it is used."""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from commutator import hookimpl

if TYPE_CHECKING:
    from commutator.contract.commands import CommandRegister


@hookimpl
def command_register(register: CommandRegister) -> None:
    """`commutator init`, `new-plugin`, `demo` and `completion`."""
    for name, place, text in (
        ("init", "init:init", "Write a configuration to start from."),
        ("new-plugin", "new_plugin:new_plugin", "Create a package for a plugin of your own."),
        ("demo", "demo:demo", "Start a deployment, hold a conversation, show what happened."),
        ("completion", "completion:completion", "Let the shell complete commands and options."),
    ):
        register(name, text, partial(resolve_name, f"commutator_scaffold.{place}"))

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
    """What shows: what is installed, and what a running deployment does."""
    for name, text in (
        ("plugins", "List the installed plugins."),
        ("top", "Show a running deployment live, in the terminal."),
        ("route", "Show where a prompt is routed, and why."),
        ("kv", "Show and change the KV blocks in storage tiers."),
    ):
        register(name, text, partial(resolve_name, f"commutator_console.{name}:{name}"))

"""The commands of this package; each is imported when it is used."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from commutator import hookimpl

if TYPE_CHECKING:
    from commutator.contract.commands import CommandRegister


@hookimpl
def command_register(register: CommandRegister) -> None:
    """`commutator top`, `commutator route` and `commutator kv`."""
    for name, text in (
        ("top", "Show a running deployment live, in the terminal."),
        ("route", "Show where a prompt is routed, and why."),
        ("kv", "Show and change the KV blocks in storage tiers."),
    ):
        register(name, text, partial(_command, name))


def _command(name: str) -> Any:
    return getattr(import_module(f"commutator_console.{name}"), name)

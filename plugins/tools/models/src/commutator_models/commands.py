"""The command of this package; it is imported when it is used."""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from commutator import hookimpl

if TYPE_CHECKING:
    from commutator.contract.commands import CommandRegister


@hookimpl
def command_register(register: CommandRegister) -> None:
    """`commutator models` and `commutator size`."""
    for name, text in (
        ("models", "Show what a model keeps as KV, and what engines do with it."),
        ("size", "Compute how large storage tiers have to be."),
    ):
        register(name, text, partial(resolve_name, f"commutator_models.{name}:{name}"))

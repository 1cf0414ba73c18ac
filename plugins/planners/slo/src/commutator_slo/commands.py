"""The commands of this package; each is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commutator import hookimpl

if TYPE_CHECKING:
    from commutator.contract.commands import CommandRegister


@hookimpl
def command_register(register: CommandRegister) -> None:
    """`commutator planner`."""
    register("planner", "Show what the planner wants, why, and what it did.", _planner)


def _planner() -> Any:
    return import_module("commutator_slo.cli.command").planner

"""The command of this package; it is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commutator import hookimpl

if TYPE_CHECKING:
    from commutator.contract.commands import CommandRegister


@hookimpl
def command_register(register: CommandRegister) -> None:
    """`commutator models`."""
    register("models", "Show what a model keeps as KV, and what engines do with it.", _models)


def _models() -> Any:
    return import_module("commutator_models.models").models

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
    """What changes a running deployment: its document, its workers, its hosts."""
    for name, module, text in (
        ("apply", "cli", "Change a running deployment to what a file describes."),
        ("diff", "cli", "Show what apply would change, and what that costs."),
        ("rollout", "cli", "Show, pause, resume or undo a change; list the last ones."),
        ("worker", "worker", "List workers; drain one, change its role; run some of a cluster."),
        ("cluster", "cluster", "List and drain workers of all hosts."),
        ("down", "down", "Stop the workers that a launcher such as ray has placed."),
    ):
        register(name, text, partial(_command, module, name))


def _command(module: str, name: str) -> Any:
    return getattr(import_module(f"commutator_rollout.{module}"), name)

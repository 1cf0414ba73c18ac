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
    """What changes a running deployment: its document, its workers, its hosts, its keys."""
    for name, module, text in (
        ("apply", "cli", "Change a running deployment to what a file describes."),
        ("diff", "cli", "Show what apply would change, and what that costs."),
        ("rollout", "cli", "Show, pause, resume or undo a change; list the last ones."),
        ("adapter", "adapter", "Serve LoRA adapters beside a running model; list them."),
        ("worker", "worker", "List workers; drain one, change its role; run some of a cluster."),
        ("key", "key", "Create an API key for a principal."),
        ("cluster", "cluster", "List and drain workers of all hosts."),
        ("down", "down", "Stop the workers that a launcher such as ray has placed."),
    ):
        register(name, text, partial(resolve_name, f"commutator_rollout.{module}:{name}"))

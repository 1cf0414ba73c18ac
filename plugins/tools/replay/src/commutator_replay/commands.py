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
    """`commutator replay` and `commutator planner search`."""
    for name, place, text in (
        ("replay", "cli:replay", "Replay recorded traffic over routing policies."),
        (
            "planner search",
            "search_cli:search",
            "Search the settings that serve recorded traffic best.",
        ),
    ):
        register(name, text, partial(resolve_name, f"commutator_replay.{place}"))

"""The commands of this package; each is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commutator import hookimpl

if TYPE_CHECKING:
    from commutator.contract.commands import CommandRegister


@hookimpl
def command_register(register: CommandRegister) -> None:
    """`commutator replay` and `commutator planner search`."""
    register("replay", "Replay recorded traffic over routing policies.", _replay)
    register("planner search", "Search the settings that serve recorded traffic best.", _search)


def _replay() -> Any:
    return import_module("commutator_replay.cli").replay


def _search() -> Any:
    return import_module("commutator_replay.search_cli").search

"""The commands of this package; each is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commutator import hookimpl

if TYPE_CHECKING:
    from commutator.contract.commands import CommandRegister


@hookimpl
def command_register(register: CommandRegister) -> None:
    """`commutator top`, `commutator route` and `commutator kv`."""
    register("top", "Show a running deployment live, in the terminal.", _top)
    register("route", "Show where a prompt is routed, and why.", _route)
    register("kv", "Show and change the KV blocks in storage tiers.", _kv)


def _top() -> Any:
    return import_module("commutator_console.top").top


def _route() -> Any:
    return import_module("commutator_console.route").route


def _kv() -> Any:
    return import_module("commutator_console.kv.command").kv

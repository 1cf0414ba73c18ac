"""The commands of this package; each is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commutator import hookimpl

if TYPE_CHECKING:
    from commutator.contract.commands import CommandRegister


@hookimpl
def command_register(register: CommandRegister) -> None:
    """`commutator init`, `commutator new-plugin`, `commutator demo` and `commutator completion`."""
    register("init", "Write a configuration to start from.", _init)
    register("new-plugin", "Create a package for a plugin of your own.", _new_plugin)
    register("demo", "Start a deployment, hold a conversation, show what happened.", _demo)
    register("completion", "Let the shell complete commands and options.", _completion)


def _init() -> Any:
    return import_module("commutator_scaffold.init").init


def _new_plugin() -> Any:
    return import_module("commutator_scaffold.new_plugin").new_plugin


def _demo() -> Any:
    return import_module("commutator_scaffold.demo").demo


def _completion() -> Any:
    return import_module("commutator_scaffold.completion").completion

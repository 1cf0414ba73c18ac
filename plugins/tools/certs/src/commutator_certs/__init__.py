"""The command ``commutator certs``; it is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commutator import hookimpl

if TYPE_CHECKING:
    from commutator.contract.commands import CommandRegister


@hookimpl
def command_register(register: CommandRegister) -> None:
    """`commutator certs`."""
    register("certs", "Create and renew the certificates of a cluster's hosts.", _certs)


def _certs() -> Any:
    return import_module("commutator_certs.cli").certs

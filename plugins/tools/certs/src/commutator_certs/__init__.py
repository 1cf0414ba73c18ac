"""The command ``commutator certs``; it is imported when it is used."""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from commutator import hookimpl

if TYPE_CHECKING:
    from commutator.contract.commands import CommandRegister


@hookimpl
def command_register(register: CommandRegister) -> None:
    """`commutator certs`."""
    register(
        "certs",
        "Create and renew the certificates of a cluster's hosts.",
        partial(resolve_name, "commutator_certs.cli:certs"),
    )

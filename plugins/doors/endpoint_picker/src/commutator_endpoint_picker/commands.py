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
    """`commutator epp`."""
    register(
        "epp",
        "Check a gateway that asks an endpoint picker.",
        partial(resolve_name, "commutator_endpoint_picker.cli:epp"),
    )

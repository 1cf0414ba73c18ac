"""The command of this package; it is imported when it is used."""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from commutator import hookimpl

if TYPE_CHECKING:
    from commutator.contract.commands import CommandRegister


@hookimpl
def command_register(register: CommandRegister) -> None:
    """`commutator doctor`."""
    help_ = "Find what is wrong with a machine or a deployment, and what to do."
    register("doctor", help_, partial(resolve_name, "commutator_doctor.doctor:doctor"))

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
    """`commutator kubernetes` and `commutator import`."""
    register(
        "kubernetes",
        "Write a deployment as Kubernetes objects.",
        partial(resolve_name, "commutator_kubernetes_tools.cli:kubernetes"),
    )
    register(
        "import",
        "Write a configuration from another server's deployment.",
        partial(resolve_name, "commutator_kubernetes_tools.import_cli:import_"),
    )

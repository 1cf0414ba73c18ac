"""Registers the operations of kind `console`; what serves them is imported in front doors alone."""

from __future__ import annotations

from importlib import import_module

from commutator import hookimpl
from commutator.contract.operations import Operations, OperationsConfig, OperationsContext
from commutator.contract.registration import OperationsRegister


def _console(_: OperationsConfig, context: OperationsContext) -> Operations:
    made: Operations = import_module("commutator_console.live").Console(context)
    return made


@hookimpl
def operations_register(register: OperationsRegister) -> None:
    """Kind `console`: the live view, and the page at /ui that shows it."""
    register("console", OperationsConfig, _console, "beta")

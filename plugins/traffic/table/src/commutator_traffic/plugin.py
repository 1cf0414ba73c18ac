"""Registers the traffic of kind `table`."""

from __future__ import annotations

from commutator import hookimpl
from commutator.contract.registration import TrafficRegister
from commutator_traffic.config import TableConfig
from commutator_traffic.table import Table


@hookimpl
def traffic_register(register: TrafficRegister) -> None:
    register("table", TableConfig, Table, "alpha")

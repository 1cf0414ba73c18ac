"""The traffic plugin that comes with the project passes the shipped suite."""

from __future__ import annotations

from commutator.contract.traffic import Traffic
from commutator_testing.traffic import TrafficContract
from commutator_traffic.config import AliasConfig, FallBackConfig, TableConfig
from commutator_traffic.table import Table


class TestTable(TrafficContract):
    def make_traffic(self) -> Traffic:
        fall_back = (FallBackConfig(model="v2", when=("overload",)), FallBackConfig(model="small"))
        aliases = {
            "default": AliasConfig(models={"v1": 95, "v2": 5}, fall_back=fall_back),
            "v1": AliasConfig(models={"small": 1, "v1": 0}),
        }
        return Table(TableConfig(aliases=aliases))

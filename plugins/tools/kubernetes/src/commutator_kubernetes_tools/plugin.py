"""The operations `probes`: what the pod of a worker answers a kubelet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from commutator import hookimpl, setting
from commutator.contract.operations import (
    Operations,
    OperationsConfig,
    OperationsContext,
    SupervisedOperations,
    SupervisorContext,
)
from commutator.contract.settings import Port

if TYPE_CHECKING:
    from commutator.contract.registration import OperationsRegister
    from commutator.contract.service import Service


@frozen(kw_only=True)
class ProbesConfig(OperationsConfig):
    """Answers /live and /ready for hosts that run workers and no front door, as pods do."""

    probe_port: Port = setting("TCP port of /live and /ready, on every address of the host.", 8081)


def _at_door(config: ProbesConfig, context: OperationsContext) -> Operations:
    from commutator_kubernetes_tools.probes import NothingAtDoors

    del config, context
    return NothingAtDoors()


async def _beside(config: ProbesConfig, context: SupervisorContext) -> Service:
    from commutator_kubernetes_tools.probes import Probes

    return Probes(config.probe_port, context.supervisor)


@hookimpl
def operations_register(register: OperationsRegister) -> None:
    """`operations: [{kind: probes}]`."""
    register("probes", ProbesConfig, SupervisedOperations(_at_door, _beside))

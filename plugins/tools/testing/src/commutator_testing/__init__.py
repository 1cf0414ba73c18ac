"""For plugin authors: conformance suites and a local cluster.

Subclass a suite (`EngineContract`, `RouterContract`, `DisaggContract`, `TierContract`,
`EvictionContract`, `FairnessContract`, `LauncherContract`, `RegistryContract`, `EventBusContract`,
`ObserverContract`, `OperationsContract`, `CommandContract`, `AuthenticatorContract`,
`LimiterContract`, `PlannerContract`, `ProtocolContract`, `TrafficContract`), supply a factory or
fixture, and run pytest. Suites set their own pytest marks, so they need no configuration. Each name
is imported at its first use: the suites need pytest, pytest-asyncio and hypothesis, and
`TierContract` also needs NIXL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commutator.faces import face

if TYPE_CHECKING:
    from commutator_scaffold.local_cluster import LocalCluster
    from commutator_testing.authenticators import AuthenticatorContract
    from commutator_testing.commands import CommandContract
    from commutator_testing.disagg import DisaggContract
    from commutator_testing.engines import EngineContract, collect, make_request
    from commutator_testing.event_buses import EventBusContract
    from commutator_testing.eviction import EvictionContract, tree_block
    from commutator_testing.fairness import FairnessContract
    from commutator_testing.launchers import LauncherContract
    from commutator_testing.limiters import LimiterContract
    from commutator_testing.observers import ObserverContract
    from commutator_testing.operations import OperationsContract
    from commutator_testing.planners import PlannerContract
    from commutator_testing.protocols import ProtocolContract
    from commutator_testing.registries import RegistryContract
    from commutator_testing.routers import RouterContract, make_candidate
    from commutator_testing.tiers import TierContract
    from commutator_testing.traffic import TrafficContract

__all__ = [
    "AuthenticatorContract",
    "CommandContract",
    "DisaggContract",
    "EngineContract",
    "EventBusContract",
    "EvictionContract",
    "FairnessContract",
    "LauncherContract",
    "LimiterContract",
    "LocalCluster",
    "ObserverContract",
    "OperationsContract",
    "PlannerContract",
    "ProtocolContract",
    "RegistryContract",
    "RouterContract",
    "TierContract",
    "TrafficContract",
    "collect",
    "make_candidate",
    "make_request",
    "tree_block",
]

_find = face(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _find(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("commutator"):
            raise
        brings = "commutator-engine-kit[nixl]" if error.name == "nixl" else "commutator[testing]"
        raise ModuleNotFoundError(
            f"{name} needs {error.name}: pip install '{brings}', which brings it",
            name=error.name,
        ) from error

"""For plugin authors: conformance suites, fault wrappers and a local cluster.

Subclass a suite (`EngineContract`, `RouterContract`, `DisaggContract`, `TierContract`,
`EvictionContract`, `FairnessContract`, `LauncherContract`, `RegistryContract`, `EventBusContract`,
`ObserverContract`, `OperationsContract`, `CommandContract`, `AuthenticatorContract`,
`LimiterContract`, `PlannerContract`, `ForecasterContract`, `ConstraintContract`), supply a factory
or fixture, and run pytest. Suites set their own pytest marks, so they need no configuration. Each
name is imported at its first use: the suites need pytest, pytest-asyncio and hypothesis, and
`TierContract` also needs NIXL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commutator_scaffold.local_cluster import LocalCluster
    from commutator_testing.authenticators import AuthenticatorContract
    from commutator_testing.commands import CommandContract
    from commutator_testing.disagg import DisaggContract
    from commutator_testing.engines import EngineContract, WorkerPair, collect, make_request
    from commutator_testing.event_buses import BusFaults, EventBusContract, FaultyBus
    from commutator_testing.eviction import EvictionContract, tree_block
    from commutator_testing.fairness import FairnessContract
    from commutator_testing.faults import (
        Faults,
        FaultyClient,
        FaultyIo,
        FaultyTier,
        IoFaults,
        TierFaults,
        damage,
    )
    from commutator_testing.launchers import LauncherContract
    from commutator_testing.limiters import LimiterContract
    from commutator_testing.observers import ObserverContract
    from commutator_testing.operations import OperationsContract
    from commutator_testing.planners import PlannerContract
    from commutator_testing.registries import RegistryContract
    from commutator_testing.routers import RouterContract, check_decision, make_candidate
    from commutator_testing.tier_user import TierUser
    from commutator_testing.tiers import TierContract

__all__ = [
    "AuthenticatorContract",
    "BusFaults",
    "CommandContract",
    "DisaggContract",
    "EngineContract",
    "EventBusContract",
    "EvictionContract",
    "FairnessContract",
    "Faults",
    "FaultyBus",
    "FaultyClient",
    "FaultyIo",
    "FaultyTier",
    "IoFaults",
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
    "TierFaults",
    "TierUser",
    "WorkerPair",
    "check_decision",
    "collect",
    "damage",
    "make_candidate",
    "make_request",
    "tree_block",
]

_HOMES = {
    "commutator_scaffold.local_cluster": ("LocalCluster",),
    "commutator_testing.authenticators": ("AuthenticatorContract",),
    "commutator_testing.commands": ("CommandContract",),
    "commutator_testing.disagg": ("DisaggContract",),
    "commutator_testing.engines": ("EngineContract", "WorkerPair", "collect", "make_request"),
    "commutator_testing.event_buses": ("BusFaults", "EventBusContract", "FaultyBus"),
    "commutator_testing.eviction": ("EvictionContract", "tree_block"),
    "commutator_testing.fairness": ("FairnessContract",),
    "commutator_testing.faults": (
        "Faults",
        "FaultyClient",
        "FaultyIo",
        "FaultyTier",
        "IoFaults",
        "TierFaults",
        "damage",
    ),
    "commutator_testing.launchers": ("LauncherContract",),
    "commutator_testing.limiters": ("LimiterContract",),
    "commutator_testing.observers": ("ObserverContract",),
    "commutator_testing.operations": ("OperationsContract",),
    "commutator_testing.planners": ("PlannerContract",),
    "commutator_testing.protocols": ("ProtocolContract",),
    "commutator_testing.registries": ("RegistryContract",),
    "commutator_testing.routers": ("RouterContract", "check_decision", "make_candidate"),
    "commutator_testing.tier_user": ("TierUser",),
    "commutator_testing.tiers": ("TierContract",),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'commutator_testing' has no attribute {name!r}")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("commutator"):
            raise
        brings = "commutator-engine-kit[nixl]" if error.name == "nixl" else "commutator[testing]"
        raise ModuleNotFoundError(
            f"{name} needs {error.name}: pip install '{brings}', which brings it",
            name=error.name,
        ) from error

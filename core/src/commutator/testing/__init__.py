"""For plugin authors: conformance suites, fault wrappers and a local cluster.

Needs ``pip install commutator[testing]``.
"""

from commutator.runtime.local_cluster import LocalCluster
from commutator.testing.disagg import DisaggContract
from commutator.testing.engines import EngineContract, collect, make_request
from commutator.testing.eviction import EvictionContract, tree_block
from commutator.testing.faults import Faults, FaultyClient
from commutator.testing.handover import WorkerPair
from commutator.testing.routers import RouterContract, check_decision, make_candidate
from commutator.testing.tier_faults import FaultyIo, FaultyTier, IoFaults, TierFaults, damage
from commutator.testing.tiers import TierContract, TierUser

__all__ = [
    "DisaggContract",
    "EngineContract",
    "EvictionContract",
    "Faults",
    "FaultyClient",
    "FaultyIo",
    "FaultyTier",
    "IoFaults",
    "LocalCluster",
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

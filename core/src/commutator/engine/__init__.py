"""How a worker is reached, and what an engine of one's own needs to be one."""

from commutator.engine.client import TokenApiClient
from commutator.engine.embedded import EmbeddedTiers
from commutator.engine.embedded_state import TierPlan
from commutator.engine.launched_tiers import missing_plugin, write_tiers
from commutator.engine.launching import free_ports, gpus_of, python_at
from commutator.engine.process import EngineStart, engine_command, run_engine_process
from commutator.engine.server import Emit, TokenApiServer, TokenEngine
from commutator.engine.stream import DeltaStream
from commutator.engine.tier_policy import admission_rules, eviction_policy
from commutator.engine.virtual import (
    BlocksGone,
    BlocksHeld,
    BlocksPulled,
    BlocksReady,
    PrefillDone,
    RequestDone,
    TokensMade,
    VirtualEngine,
    VirtualEvent,
    VirtualRequest,
)
from commutator.engine.weights_revision import weights_revision

__all__ = [
    "BlocksGone",
    "BlocksHeld",
    "BlocksPulled",
    "BlocksReady",
    "DeltaStream",
    "EmbeddedTiers",
    "Emit",
    "EngineStart",
    "PrefillDone",
    "RequestDone",
    "TierPlan",
    "TokenApiClient",
    "TokenApiServer",
    "TokenEngine",
    "TokensMade",
    "VirtualEngine",
    "VirtualEvent",
    "VirtualRequest",
    "admission_rules",
    "engine_command",
    "eviction_policy",
    "free_ports",
    "gpus_of",
    "missing_plugin",
    "python_at",
    "run_engine_process",
    "weights_revision",
    "write_tiers",
]

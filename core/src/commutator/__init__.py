"""Commutator: a plugin framework for distributed LLM inference.

What a plugin may import is what stands here, ``commutator.types``, ``commutator.errors``, what
``commutator.engine``, ``commutator.kv`` and ``commutator.text`` export, and
``commutator.testing`` for its tests.
"""

from commutator.config.model import EngineConfig, ModelConfig, RouterConfig, TierConfig
from commutator.engine.contract import (
    EngineClient,
    EngineConnector,
    LaunchContext,
    LaunchPlan,
    TokenStream,
)
from commutator.hookspecs import hookimpl
from commutator.plugins import EngineRegister, RouterRegister, StageRegister, TierRegister
from commutator.routing.contract import (
    Candidate,
    Decision,
    Overlap,
    RouteRequest,
    RoutingPolicy,
    WorkerLoad,
)
from commutator.routing.stages import Filter, Picker, Scorer
from commutator.schema import setting

__version__ = "0.1.0"

__all__ = [
    "Candidate",
    "Decision",
    "EngineClient",
    "EngineConfig",
    "EngineConnector",
    "EngineRegister",
    "Filter",
    "LaunchContext",
    "LaunchPlan",
    "ModelConfig",
    "Overlap",
    "Picker",
    "RouteRequest",
    "RouterConfig",
    "RouterRegister",
    "RoutingPolicy",
    "Scorer",
    "StageRegister",
    "TierConfig",
    "TierRegister",
    "TokenStream",
    "WorkerLoad",
    "hookimpl",
    "setting",
]

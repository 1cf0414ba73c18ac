"""Commutator: a plugin framework for distributed LLM inference.

What a plugin may import is what stands here, ``commutator.types``, ``commutator.errors``, what
``commutator.engine``, ``commutator.kv``, ``commutator.transfer`` and ``commutator.text`` export,
and ``commutator.testing`` for its tests. Each name is imported when it is first used, so that the
command line answers quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commutator.config.model import (
        DisaggregationConfig,
        EngineConfig,
        EvictionConfig,
        ModelConfig,
        RouterConfig,
        TierConfig,
        TierPolicyConfig,
    )
    from commutator.config.secret import Secret
    from commutator.engine.contract import (
        EngineClient,
        EngineConnector,
        ForwardedAnswer,
        LaunchContext,
        LaunchPlan,
        TokenStream,
    )
    from commutator.hookspecs import hookimpl
    from commutator.kv.eviction import EvictionPolicy
    from commutator.plugins import (
        DisaggRegister,
        EngineRegister,
        EvictionRegister,
        RouterRegister,
        StageRegister,
        TierRegister,
    )
    from commutator.routing.contract import (
        Candidate,
        Decision,
        Overlap,
        RouteRequest,
        RoutingPolicy,
        WorkerLoad,
    )
    from commutator.routing.disagg import (
        DisaggAnswer,
        DisaggPolicy,
        DisaggQuestion,
        MeasuredSpeeds,
    )
    from commutator.routing.stages import Filter, Picker, Scorer
    from commutator.schema import setting

__version__ = "0.1.0"

__all__ = [
    "Candidate",
    "Decision",
    "DisaggAnswer",
    "DisaggPolicy",
    "DisaggQuestion",
    "DisaggRegister",
    "DisaggregationConfig",
    "EngineClient",
    "EngineConfig",
    "EngineConnector",
    "EngineRegister",
    "EvictionConfig",
    "EvictionPolicy",
    "EvictionRegister",
    "Filter",
    "ForwardedAnswer",
    "LaunchContext",
    "LaunchPlan",
    "MeasuredSpeeds",
    "ModelConfig",
    "Overlap",
    "Picker",
    "RouteRequest",
    "RouterConfig",
    "RouterRegister",
    "RoutingPolicy",
    "Scorer",
    "Secret",
    "StageRegister",
    "TierConfig",
    "TierPolicyConfig",
    "TierRegister",
    "TokenStream",
    "WorkerLoad",
    "hookimpl",
    "setting",
]

_HOMES = (
    "commutator.config.model",
    "commutator.config.secret",
    "commutator.engine.contract",
    "commutator.hookspecs",
    "commutator.kv.eviction",
    "commutator.plugins",
    "commutator.routing.contract",
    "commutator.routing.disagg",
    "commutator.routing.stages",
    "commutator.schema",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in map(import_module, _HOMES):
            if name in home.__all__:
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

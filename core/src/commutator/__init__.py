"""Commutator: a plugin framework for distributed LLM inference.

The names that most plugins need are here; those of one seam are in its module of
``commutator.contract``. What else a plugin may import depends on its family: the table in
docs/explanation/architecture.md says it. Each module is imported when one of its names is first
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commutator.faces import face

if TYPE_CHECKING:
    from commutator.contract.block import KEY_BYTES, BlockKey, RetentionHints
    from commutator.contract.capability import Operation, OptionType, RequestOption
    from commutator.contract.disagg import (
        DisaggAnswer,
        DisaggPolicy,
        DisaggQuestion,
        DisaggregationConfig,
        HandoverOutcome,
        HandoverRequest,
        HandoverStyle,
        MeasuredSpeeds,
    )
    from commutator.contract.door import Door, DoorConfig
    from commutator.contract.engine import (
        EngineClient,
        EngineConfig,
        EngineConnector,
        ForwardedAnswer,
        LaunchContext,
        ModelConfig,
        TokenStream,
    )
    from commutator.contract.eviction import EvictionConfig, EvictionPolicy
    from commutator.contract.launcher import LaunchPlan
    from commutator.contract.observer import AnsweredRequest, Observer, ObserverConfig
    from commutator.contract.protocol import MountedProtocol, Protocol, ProtocolConfig, Route
    from commutator.contract.registration import (
        DisaggRegister,
        DoorRegister,
        EngineRegister,
        EvictionRegister,
        ObserverRegister,
        ProtocolRegister,
        RouterRegister,
        StageRegister,
        TierRegister,
    )
    from commutator.contract.request import (
        AdapterIdentity,
        Constraint,
        FinishReason,
        GenerateRequest,
        KvRetention,
        MediaIdentity,
        Pooling,
        RequestOutcome,
        RequestSummary,
        SamplingParams,
        TokenDelta,
        TokenLogprob,
    )
    from commutator.contract.routing import (
        Candidate,
        Decision,
        Filter,
        Overlap,
        Picker,
        RouterConfig,
        RouteRequest,
        RoutingPolicy,
        Scorer,
        WorkerLoad,
    )
    from commutator.contract.settings import (
        Bounds,
        Fraction,
        NonNegativeInt,
        PositiveInt,
        PositiveSeconds,
        Seconds,
        Secret,
        Size,
        setting,
    )
    from commutator.contract.tier import (
        UNBOUNDED,
        Memory,
        Region,
        Slot,
        SlotGeometry,
        Span,
        StorageTier,
        StoredBlock,
        TierConfig,
        TierStatistics,
    )
    from commutator.contract.worker import (
        EngineInfo,
        EngineLoad,
        EventSource,
        KvPrompt,
        KvTransferInfo,
        WorkerRecord,
    )
    from commutator.hookspecs import hookimpl

__version__ = "0.2.0"

__all__ = [
    "KEY_BYTES", "UNBOUNDED", "AdapterIdentity", "AnsweredRequest", "BlockKey", "Bounds",
    "Candidate", "Constraint", "Decision", "DisaggAnswer", "DisaggPolicy", "DisaggQuestion",
    "DisaggRegister", "DisaggregationConfig", "Door", "DoorConfig", "DoorRegister",
    "EngineClient", "EngineConfig", "EngineConnector", "EngineInfo", "EngineLoad",
    "EngineRegister", "EventSource", "EvictionConfig", "EvictionPolicy", "EvictionRegister",
    "Filter", "FinishReason", "ForwardedAnswer", "Fraction", "GenerateRequest",
    "HandoverOutcome", "HandoverRequest", "HandoverStyle", "KvPrompt", "KvRetention",
    "KvTransferInfo", "LaunchContext", "LaunchPlan", "MeasuredSpeeds", "MediaIdentity",
    "Memory", "ModelConfig", "MountedProtocol", "NonNegativeInt", "Observer", "ObserverConfig",
    "ObserverRegister", "Operation", "OptionType", "Overlap", "Picker", "Pooling",
    "PositiveInt", "PositiveSeconds", "Protocol", "ProtocolConfig", "ProtocolRegister",
    "Region", "RequestOption", "RequestOutcome", "RequestSummary", "RetentionHints", "Route",
    "RouteRequest", "RouterConfig", "RouterRegister", "RoutingPolicy", "SamplingParams",
    "Scorer", "Seconds", "Secret", "Size", "Slot", "SlotGeometry", "Span", "StageRegister",
    "StorageTier", "StoredBlock", "TierConfig", "TierRegister", "TierStatistics", "TokenDelta",
    "TokenLogprob", "TokenStream", "WorkerLoad", "WorkerRecord", "hookimpl", "setting",
]  # fmt: skip

__getattr__ = face(__name__, __file__)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""KV blocks in an engine's process: what plugins for engines and storage tiers use of them.

``connector`` is what an engine uses. Below it: ``block_manager`` decides, without I/O, which blocks
are in which tier; ``tiers`` moves their bytes, each tier's on its own thread; ``transfer`` brings
blocks from one worker to another.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commutator.contract.block import (
        PLAIN,
        BlockDescriptor,
        CacheIdentity,
        CacheLevel,
        cache_level,
        is_stronger,
        next_key,
        retention_hints,
    )
    from commutator.contract.tier import BlockSeal, ExportOptions, RemoteAgent, TierPolicyConfig
    from commutator.contract.worker import TransferStatistics
    from commutator.kv.admin import DeviceBlocks, KvAdmin, LocatedPrompt
    from commutator.kv.arena import Arena, BlockArena, BlockPart, ScatteredArena, bytes_at, checksum
    from commutator.kv.block_manager.actions import (
        Action,
        Announce,
        LoadResult,
        StoreBlocks,
        event_hash,
    )
    from commutator.kv.block_manager.admission import AdmissionRule
    from commutator.kv.block_manager.block_pool import TierSpec
    from commutator.kv.block_manager.break_even import PrefillSpeed
    from commutator.kv.block_manager.manager import BlockManager
    from commutator.kv.connector import FinishedOnboard, KvConnector, OnboardTicket
    from commutator.kv.tiers.slot_tier import OpenedSlots, SlotTier

__all__ = [
    "PLAIN",
    "Action",
    "AdmissionRule",
    "Announce",
    "Arena",
    "BlockArena",
    "BlockDescriptor",
    "BlockManager",
    "BlockPart",
    "BlockSeal",
    "CacheIdentity",
    "CacheLevel",
    "DeviceBlocks",
    "ExportOptions",
    "FinishedOnboard",
    "KvAdmin",
    "KvConnector",
    "LoadResult",
    "LocatedPrompt",
    "OnboardTicket",
    "OpenedSlots",
    "PrefillSpeed",
    "RemoteAgent",
    "ScatteredArena",
    "SlotTier",
    "StoreBlocks",
    "TierPolicyConfig",
    "TierSpec",
    "TransferStatistics",
    "bytes_at",
    "cache_level",
    "checksum",
    "event_hash",
    "is_stronger",
    "next_key",
    "retention_hints",
]

_HOMES = (
    "commutator.contract.block",
    "commutator.contract.tier",
    "commutator.contract.worker",
    "commutator.kv.arena",
    "commutator.kv.block_manager.actions",
    "commutator.kv.block_manager.admission",
    "commutator.kv.block_manager.block_pool",
    "commutator.kv.block_manager.break_even",
    "commutator.kv.block_manager.manager",
    "commutator.kv.tiers.slot_tier",
    "commutator.kv.connector",
    "commutator.kv.admin",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in map(import_module, _HOMES):
            if name in home.__all__:
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

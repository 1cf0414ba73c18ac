"""KV blocks in an engine's process: what plugins for engines and storage tiers use of them.

``connector`` is what an engine uses. Below it: ``block_manager`` decides, without I/O, which blocks
are in which tier; ``tiers`` moves their bytes, each tier's on its own thread; ``transfer`` brings
blocks from one worker to another.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commutator_engine_kit.kv.admin import DeviceBlocks, KvAdmin, LocatedPrompt
    from commutator_engine_kit.kv.arena import (
        Arena,
        BlockArena,
        BlockPart,
        ScatteredArena,
        bytes_at,
        checksum,
    )
    from commutator_engine_kit.kv.block_manager.actions import (
        Action,
        Announce,
        LoadResult,
        StoreBlocks,
        event_hash,
    )
    from commutator_engine_kit.kv.block_manager.admission import AdmissionRule
    from commutator_engine_kit.kv.block_manager.block_pool import TierSpec
    from commutator_engine_kit.kv.block_manager.break_even import PrefillSpeed
    from commutator_engine_kit.kv.block_manager.manager import BlockManager
    from commutator_engine_kit.kv.connector import FinishedOnboard, KvConnector, OnboardTicket
    from commutator_engine_kit.kv.tiers.slot_tier import OpenedSlots, SlotTier

__all__ = [
    "Action",
    "AdmissionRule",
    "Announce",
    "Arena",
    "BlockArena",
    "BlockManager",
    "BlockPart",
    "DeviceBlocks",
    "FinishedOnboard",
    "KvAdmin",
    "KvConnector",
    "LoadResult",
    "LocatedPrompt",
    "OnboardTicket",
    "OpenedSlots",
    "PrefillSpeed",
    "ScatteredArena",
    "SlotTier",
    "StoreBlocks",
    "TierSpec",
    "bytes_at",
    "checksum",
    "event_hash",
]

_HOMES = (
    "commutator_engine_kit.kv.arena",
    "commutator_engine_kit.kv.block_manager.actions",
    "commutator_engine_kit.kv.block_manager.admission",
    "commutator_engine_kit.kv.block_manager.block_pool",
    "commutator_engine_kit.kv.block_manager.break_even",
    "commutator_engine_kit.kv.block_manager.manager",
    "commutator_engine_kit.kv.tiers.slot_tier",
    "commutator_engine_kit.kv.connector",
    "commutator_engine_kit.kv.admin",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in map(import_module, _HOMES):
            if name in home.__all__:
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

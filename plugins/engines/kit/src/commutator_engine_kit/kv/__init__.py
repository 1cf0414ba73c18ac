"""KV blocks in an engine's process: what plugins for engines and storage tiers use of them.

``connector`` is what an engine uses. Below it: ``block_manager`` decides, without I/O, which blocks
are in which tier; ``tiers`` moves their bytes, each tier's on its own thread; ``transfer`` brings
blocks from one worker to another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commutator.faces import face

if TYPE_CHECKING:
    from commutator_engine_kit.kv.admin import KvAdmin, LocatedPrompt
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
        beside,
        event_hash,
    )
    from commutator_engine_kit.kv.block_manager.block_pool import TierSpec
    from commutator_engine_kit.kv.block_manager.manager import BlockManager
    from commutator_engine_kit.kv.block_manager.onboard import GroupChain
    from commutator_engine_kit.kv.connector import KvConnector
    from commutator_engine_kit.kv.groups import (
        KvGroup,
        KvKind,
        alignment,
        announced_group,
        group_identities,
        is_behind,
        usable_boundary,
        whole,
    )
    from commutator_engine_kit.kv.loads import Loads
    from commutator_engine_kit.kv.lookups import Lookups
    from commutator_engine_kit.kv.stores import Stores
    from commutator_engine_kit.kv.tier_stack import FinishedOnboard, OnboardTicket, Polled
    from commutator_engine_kit.kv.tiers.setup import eviction_factory
    from commutator_engine_kit.kv.tiers.slot_tier import OpenedSlots, SlotTier

__all__ = [
    "Action",
    "Announce",
    "Arena",
    "BlockArena",
    "BlockManager",
    "BlockPart",
    "FinishedOnboard",
    "GroupChain",
    "KvAdmin",
    "KvConnector",
    "KvGroup",
    "KvKind",
    "LoadResult",
    "Loads",
    "LocatedPrompt",
    "Lookups",
    "OnboardTicket",
    "OpenedSlots",
    "Polled",
    "ScatteredArena",
    "SlotTier",
    "StoreBlocks",
    "Stores",
    "TierSpec",
    "alignment",
    "announced_group",
    "beside",
    "bytes_at",
    "checksum",
    "event_hash",
    "eviction_factory",
    "group_identities",
    "is_behind",
    "usable_boundary",
    "whole",
]

__getattr__ = face(__name__, __file__)

"""KV cache blocks: what they are called, where they lie, and what is said about them.

Read in this order:

- what a block is: ``keys`` (its identity), ``hashing``, ``events`` and ``medium`` (routers' words);
- who decides, purely: ``manager``, over an ``index`` of ``tier_book``s, with ``stores`` (ways down:
  ``admission``, ``eviction``, ``quota``, ``retention``) and ``loads`` (ways up: ``break_even``);
- what a tier is: ``tier`` (the contract), ``slot_tier`` (most tiers' base), ``frame``, ``codec``;
- who moves bytes, each tier's on a thread of its own: ``tier_thread`` runs the jobs of
  a ``tier_worker``, whose ``block_io`` (``direct_io`` or ``staged_io``, in ``guards``) moves them
  by a ``tier_mover``;
- who brings both together for an engine: ``service``;
- what an operator asks: ``admin``, ``why``, ``verify``.
"""

from commutator.kv.actions import Action, Announce, StoreBlocks
from commutator.kv.admin import DeviceBlocks, KvAdmin, LocatedPrompt, PromptQuestion
from commutator.kv.admission import AdmissionRule, count_uses
from commutator.kv.arena import BlockArena, bytes_at
from commutator.kv.break_even import PrefillSpeed
from commutator.kv.checksum import checksum
from commutator.kv.event_words import event_hash
from commutator.kv.events import (
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    EventBatch,
    KvEvent,
    decode_batch,
    encode_batch,
)
from commutator.kv.export_options import ExportOptions
from commutator.kv.frame import HEADER_BYTES, FrameHeader
from commutator.kv.guards import Breaker
from commutator.kv.keys import KEY_BYTES, BlockKey, CacheIdentity, block_keys, next_key
from commutator.kv.load_result import LoadResult
from commutator.kv.manager import KvManager
from commutator.kv.medium import Tier, tier_of
from commutator.kv.offer import (
    PLAIN,
    BlockFacts,
    Offer,
    block_facts,
    is_stronger,
)
from commutator.kv.peer_export import PeerExport
from commutator.kv.peer_wire import (
    PeerAnswer,
    PeerAsk,
    PeerBlock,
    PeerRelease,
    decode_peer_message,
    encode_peer_message,
)
from commutator.kv.publisher import EventPublisher
from commutator.kv.scattered_arena import Arena, BlockPart, ScatteredArena
from commutator.kv.service import FinishedLoad, KvService
from commutator.kv.slot_tier import OpenedSlots, SlotTier
from commutator.kv.tier import (
    UNBOUNDED,
    Peer,
    Slot,
    SlotGeometry,
    StorageTier,
    Stored,
    TierStatistics,
)
from commutator.kv.tier_book import TierSpec

__all__ = [
    "HEADER_BYTES",
    "KEY_BYTES",
    "PLAIN",
    "UNBOUNDED",
    "Action",
    "AdmissionRule",
    "Announce",
    "Arena",
    "BlockArena",
    "BlockFacts",
    "BlockKey",
    "BlockPart",
    "BlockRemoved",
    "BlockStored",
    "BlocksCleared",
    "Breaker",
    "CacheIdentity",
    "DeviceBlocks",
    "EventBatch",
    "EventPublisher",
    "ExportOptions",
    "FinishedLoad",
    "FrameHeader",
    "KvAdmin",
    "KvEvent",
    "KvManager",
    "KvService",
    "LoadResult",
    "LocatedPrompt",
    "Offer",
    "OpenedSlots",
    "Peer",
    "PeerAnswer",
    "PeerAsk",
    "PeerBlock",
    "PeerExport",
    "PeerRelease",
    "PrefillSpeed",
    "PromptQuestion",
    "ScatteredArena",
    "Slot",
    "SlotGeometry",
    "SlotTier",
    "StorageTier",
    "StoreBlocks",
    "Stored",
    "Tier",
    "TierSpec",
    "TierStatistics",
    "block_facts",
    "block_keys",
    "bytes_at",
    "checksum",
    "count_uses",
    "decode_batch",
    "decode_peer_message",
    "encode_batch",
    "encode_peer_message",
    "event_hash",
    "is_stronger",
    "next_key",
    "tier_of",
]

"""KV cache blocks: which there are, and what is said about them."""

from commutator.kv.events import (
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    EventBatch,
    KvEvent,
    decode_batch,
    encode_batch,
)
from commutator.kv.medium import Tier
from commutator.kv.publisher import EventPublisher

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "BlocksCleared",
    "EventBatch",
    "EventPublisher",
    "KvEvent",
    "Tier",
    "decode_batch",
    "encode_batch",
]

"""KV events on the wire: their encoding, and their publisher at an engine."""

from commutator.kv_events.codec import (
    SEAL_BYTES,
    decode_batch,
    encode_batch,
    seal_message,
    unseal_message,
)
from commutator.kv_events.publisher import EventPublisher, bind_private

__all__ = [
    "SEAL_BYTES",
    "EventPublisher",
    "bind_private",
    "decode_batch",
    "encode_batch",
    "seal_message",
    "unseal_message",
]

"""KV events on the wire: their encoding, and what publishes them."""

from commutator.kv_events.codec import (
    SEAL_BYTES,
    decode_batch,
    encode_batch,
    group_fields,
    seal_message,
    unseal_message,
)
from commutator.kv_events.publisher import MessagePublisher, bind_private

__all__ = [
    "SEAL_BYTES",
    "MessagePublisher",
    "bind_private",
    "decode_batch",
    "encode_batch",
    "group_fields",
    "seal_message",
    "unseal_message",
]

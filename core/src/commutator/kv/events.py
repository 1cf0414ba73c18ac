"""KV events in the wire format that vLLM and SGLang publish over ZMQ.

A message is three frames: topic | sequence, 8 bytes big-endian | MessagePack
``[timestamp_s, [event, ...], data_parallel_rank]``. Today's engines write an event as a map with a
``type`` and leave out defaults; older ones as an array that begins with the type. Both are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from attrs import frozen

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "BlocksCleared",
    "EventBatch",
    "KvEvent",
    "decode_batch",
    "encode_batch",
]

BlockHash = int | bytes
"""Engines name blocks by unsigned or signed 64-bit integers, or by bytes."""

_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_REMOVED_FIELDS = ("block_hashes", "medium")
_WHOLE_PREFIX = (None, "full_attention", "mla_attention", "sink_full_attention", "unknown")
"""vLLM's kinds of layers that keep every token."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


@frozen
class BlockStored:
    """Blocks became reusable. ``token_ids`` holds ``block_size`` tokens for each block."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_name: str | None = None
    medium: str | None = "GPU"
    cache_salt: str | None = None
    """Set when only requests of this salt find the blocks; read with a first block only."""
    group: int | None = None
    """Which group of layers keeps them, in models with several kinds of attention."""
    keeps_prefix: bool = True
    """False for layers that forget what lies behind a window, or keep a state of it."""


@frozen
class BlockRemoved:
    """Blocks are no longer reusable."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = "GPU"
    group: int | None = None


@frozen
class BlocksCleared:
    """Every block is gone."""


KvEvent = BlockStored | BlockRemoved | BlocksCleared


@frozen
class EventBatch:
    """One published message."""

    timestamp_s: float
    events: tuple[KvEvent, ...]
    data_parallel_rank: int = 0


def encode_batch(batch: EventBatch) -> bytes:
    """The message body."""
    events = [_to_map(event) for event in batch.events]
    return _encoder.encode([batch.timestamp_s, events, batch.data_parallel_rank])


def decode_batch(body: bytes) -> EventBatch:
    """The inverse of ``encode_batch``; events of unknown type are left out.

    Raises ValueError when the body is not a batch of events.
    """
    try:
        timestamp_s, raw_events, *rest = _decoder.decode(body)
        events = [event for raw in raw_events if (event := _from_raw(raw)) is not None]
    except (msgspec.DecodeError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from error
    return EventBatch(timestamp_s, tuple(events), (rest[0] if rest else None) or 0)


def _to_map(event: KvEvent) -> dict[str, Any]:
    match event:
        case BlockStored():
            stored = {
                "type": "BlockStored",
                "block_hashes": event.block_hashes,
                "parent_block_hash": event.parent_block_hash,
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "medium": event.medium,
            }
            if event.lora_name:
                stored["lora_name"] = event.lora_name
            if event.cache_salt is not None:
                stored["cache_salt"] = event.cache_salt
            return stored
        case BlockRemoved():
            return {
                "type": "BlockRemoved",
                "block_hashes": event.block_hashes,
                "medium": event.medium,
            }
        case BlocksCleared():
            return {"type": "AllBlocksCleared"}


def _from_raw(raw: Mapping[str, Any] | Sequence[Any]) -> KvEvent | None:
    kind, fields = _split(raw)
    match kind:
        case "BlockStored":
            return BlockStored(
                block_hashes=tuple(fields["block_hashes"]),
                parent_block_hash=fields.get("parent_block_hash"),
                token_ids=tuple(fields["token_ids"]),
                block_size=int(fields["block_size"]),
                lora_name=fields.get("lora_name"),
                medium=fields.get("medium"),
                cache_salt=_salt(fields),
                group=fields.get("group_idx"),
                keeps_prefix=fields.get("kv_cache_spec_kind") in _WHOLE_PREFIX,
            )
        case "BlockRemoved":
            hashes = tuple(fields["block_hashes"])
            return BlockRemoved(hashes, fields.get("medium"), fields.get("group_idx"))
        case "AllBlocksCleared":
            return BlocksCleared()
        case _:
            return None


def _salt(fields: Mapping[str, Any]) -> str | None:
    """SGLang names the salt; vLLM gives it, untagged, among the first block's extra keys.

    Whatever else stands there (an image's hash) also sets the block apart, so it counts as a salt.
    """
    if (named := fields.get("cache_salt")) is not None:
        return str(named)
    first = next(iter(fields.get("extra_keys") or ()), None) or ()
    found = [key for key in first if key != fields.get("lora_name")]
    if not found:
        return None
    return found[0] if len(found) == 1 and isinstance(found[0], str) else repr(found)


def _split(raw: Mapping[str, Any] | Sequence[Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(raw, dict):
        return raw["type"], raw
    kind, *values = raw
    names = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
    return kind, dict(zip(names, values, strict=False))

"""KV events in the wire format that vLLM and SGLang publish over ZMQ.

A message has three frames: topic, sequence (8 bytes, big-endian), and body (MessagePack)
``[timestamp_s, [event, ...], data_parallel_rank]``. Current engines encode an event as a map with a
``type``, without defaults; older ones as an array that begins with the type. Both can be decoded.

On an event bus, which is shared, messages are sealed: who can publish there must not be able to
make front doors believe events, and who can ask there must get no replay. A seal hides nothing: who
can read the bus reads the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hmac import compare_digest
from typing import Any

import msgspec

from commutator.contract.block import (
    BlockHash,
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    EventBatch,
    KvEvent,
)
from commutator.trust import note_refusal, proof_of_run

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
"""vLLM's kinds of layers that keep the KV of every token."""
_CHUNKED = "chunked_local_attention"

_HASH_TYPES = frozenset({int, bytes})
_MOST_RANKS = 1024
"""Each rank that events name takes memory."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def encode_batch(batch: EventBatch) -> bytes:
    """The body of a message."""
    events = [_to_map(event) for event in batch.events]
    return _encoder.encode([batch.timestamp_s, events, batch.data_parallel_rank])


def decode_batch(body: bytes) -> EventBatch:
    """Decode the body of a message; leave out events of unknown type.

    Raises ValueError when the body is not a batch of events, or of a rank above 1,023.
    """
    try:
        timestamp_s, raw_events, *rest = _decoder.decode(body)
        events = [event for raw in raw_events if (event := _from_raw(raw)) is not None]
        rank = _rank(rest[0] if rest else None)
        time_s = float(timestamp_s)
    except (
        msgspec.DecodeError,
        TypeError,
        KeyError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        raise ValueError(f"not a batch of KV events: {error}") from error
    return EventBatch(timestamp_s=time_s, events=tuple(events), data_parallel_rank=rank)


def group_fields(event: BlockStored) -> dict[str, Any]:
    """The fields by which vLLM names the group of layers that blocks belong to, and its kind."""
    if event.group is None:
        return {}
    windowed = _CHUNKED if event.chunked else "sliding_window"
    other = windowed if event.window else "mamba"
    return {
        "group_idx": event.group,
        "kv_cache_spec_kind": "full_attention" if event.keeps_prefix else other,
        "kv_cache_spec_sliding_window": event.window or None,
    }


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
            if event.adapter:
                stored["lora_name"] = event.adapter
            if event.cache_salt is not None:
                stored["cache_salt"] = event.cache_salt
            return stored | group_fields(event)
        case BlockRemoved():
            gone = {"block_hashes": event.block_hashes, "medium": event.medium}
            named = {} if event.group is None else {"group_idx": event.group}
            return {"type": "BlockRemoved", **gone, **named}
        case BlocksCleared():
            return {"type": "AllBlocksCleared"}


def _from_raw(raw: Mapping[str, Any] | Sequence[Any]) -> KvEvent | None:
    kind, fields = _split(raw)
    match kind:
        case "BlockStored":
            return BlockStored(
                block_hashes=_hashes(fields["block_hashes"]),
                parent_block_hash=_parent(fields.get("parent_block_hash")),
                token_ids=tuple(fields["token_ids"]),
                block_size=_integer(fields["block_size"]) or 0,
                adapter=_adapter(fields),
                medium=_text(fields.get("medium")),
                cache_salt=_salt(fields),
                group=_integer(fields.get("group_idx")),
                keeps_prefix=fields.get("kv_cache_spec_kind") in _WHOLE_PREFIX,
                window=max(0, _integer(fields.get("kv_cache_spec_sliding_window")) or 0),
                chunked=fields.get("kv_cache_spec_kind") == _CHUNKED,
            )
        case "BlockRemoved":
            return BlockRemoved(
                block_hashes=_hashes(fields["block_hashes"]),
                medium=_text(fields.get("medium")),
                group=_integer(fields.get("group_idx")),
            )
        case "AllBlocksCleared":
            return BlocksCleared()
        case _:
            return None


def _hashes(raw: Iterable[Any]) -> tuple[BlockHash, ...]:
    hashes = tuple(raw)
    if not _HASH_TYPES.issuperset(map(type, hashes)):
        raise ValueError("a block hash is neither an integer nor bytes")
    return hashes


def _parent(raw: Any) -> BlockHash | None:
    return None if raw is None else _hashes((raw,))[0]


def _integer(raw: Any) -> int | None:
    if raw is None or type(raw) is int:
        return raw
    raise ValueError(f"expected an integer, got {raw!r:.40}")


def _rank(raw: Any) -> int:
    rank = _integer(raw) or 0
    if not 0 <= rank < _MOST_RANKS:
        raise ValueError(f"from data-parallel rank {rank}")
    return rank


def _text(raw: Any) -> str | None:
    if raw is None or isinstance(raw, str):
        return raw
    raise ValueError(f"expected text, got {raw!r:.40}")


def _adapter(fields: Mapping[str, Any]) -> str | None:
    """The engine's name of the adapter, which is its digest where front doors ask for it.

    An engine that gives a number alone does not say which adapter it is: nobody asks for that.
    """
    if name := _text(fields.get("lora_name")):
        return name
    number = _integer(fields.get("lora_id"))
    return None if number is None else f"lora_id {number}"


def _salt(fields: Mapping[str, Any]) -> str | None:
    """SGLang has a field for the salt; vLLM puts it, untagged, among the first block's extra keys.

    Other extra keys, such as an image's hash, also distinguish blocks, so they count as a salt.
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


SEAL_BYTES = 32
"""How much longer a sealed message is."""
_PURPOSE = "event bus"


def seal_message(place: str, message: bytes) -> bytes:
    """``message`` with the proof that a process of this run sent it at ``place``, a subject."""
    return proof_of_run(_PURPOSE, place.encode(), message) + message


def unseal_message(place: str, sealed: bytes) -> bytes | None:
    """The message that ``seal_message`` was given; None, and counted, if it was not sealed so."""
    proof, message = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
    if compare_digest(proof, proof_of_run(_PURPOSE, place.encode(), message)):
        return message
    note_refusal(_PURPOSE, place, "the message was not sealed with this run's secret")
    return None

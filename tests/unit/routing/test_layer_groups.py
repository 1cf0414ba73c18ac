"""Models with several kinds of attention: the layers that keep whole prefixes are followed."""

from __future__ import annotations

from typing import Any

import msgspec

from commutator.contract.block import KvEvent
from commutator.kv_events.codec import decode_batch
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.health import Cause, EventHealth
from commutator.routing.prefix_index.index import PrefixIndex

TOKENS = list(range(32))
HASHES = sequence_hashes(TOKENS, 16)


def event(**fields: Any) -> KvEvent:
    """As vLLM writes it."""
    (decoded,) = decode_batch(msgspec.msgpack.encode([0.0, [fields], 0])).events
    return decoded


def stored(group: int, kind: str) -> KvEvent:
    return event(
        type="BlockStored",
        block_hashes=[71, 72],
        parent_block_hash=None,
        token_ids=TOKENS,
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=group,
        kv_cache_spec_kind=kind,
    )


def removed(group: int) -> KvEvent:
    return event(type="BlockRemoved", block_hashes=[71, 72], medium="GPU", group_idx=group)


def blocks(index: PrefixIndex) -> int:
    return sum(overlap.device for overlap in index.match(HASHES).values())


def test_windows_neither_add_nor_take_away() -> None:
    index = PrefixIndex(16)
    index.apply("w", stored(1, "sliding_window"))
    assert blocks(index) == 0
    index.apply("w", stored(0, "full_attention"))
    index.apply("w", removed(1))
    assert blocks(index) == 2
    index.apply("w", removed(0))
    assert blocks(index) == 0


def test_of_several_that_keep_prefixes_one_is_followed() -> None:
    index = PrefixIndex(16)
    index.apply("w", stored(2, "full_attention"))
    index.apply("w", stored(3, "mla_attention"))
    restored = PrefixIndex(16)
    restored.restore("w", index.snapshot("w"))
    for one in (index, restored):
        one.apply("w", removed(3))
        assert blocks(one) == 2
        one.apply("w", removed(2))
        assert blocks(one) == 0


def test_it_is_said() -> None:
    index = PrefixIndex(16)
    health = EventHealth("w", "tcp://h:1", 16)
    index.apply("w", stored(0, "full_attention"))
    assert health.warnings(0.0, 16, index.worker_ranks("w").values()) == []
    index.apply("w", stored(1, "mamba"))
    (warning,) = health.warnings(0.0, 16, index.worker_ranks("w").values())
    assert warning.cause is Cause.OTHER_GROUPS
    assert "2 blocks of the others" in warning.message

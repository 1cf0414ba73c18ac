"""Models with several kinds of attention: the layers that keep whole prefixes are followed."""

from __future__ import annotations

from typing import Any

import msgspec

from commutator.contract.block import BlockRemoved, BlockStored, EventBatch, KvEvent
from commutator.kv_events.codec import decode_batch, encode_batch
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.health import Cause, EventHealth
from commutator.routing.prefix_index.index import PrefixIndex

TOKENS = list(range(32))
HASHES = sequence_hashes(TOKENS, 16)


def event(**fields: Any) -> KvEvent:
    """As vLLM writes it."""
    (decoded,) = decode_batch(msgspec.msgpack.encode([0.0, [fields], 0])).events
    return decoded


def stored(group: int, kind: str | None, **more: Any) -> KvEvent:
    fields = {
        "type": "BlockStored",
        "block_hashes": [71, 72],
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": group,
        "kv_cache_spec_kind": kind,
    }
    return event(**{**fields, **more})


def declared(group: int, kind: str) -> KvEvent:
    return stored(group, kind, block_hashes=[], token_ids=[])


def removed(group: int, *names: int) -> KvEvent:
    return event(type="BlockRemoved", block_hashes=names, medium="GPU", group_idx=group)


def blocks(index: PrefixIndex) -> int:
    return sum(overlap.device for overlap in index.match(HASHES).values())


def test_a_prefix_counts_as_far_as_windows_can_go_on() -> None:
    index = PrefixIndex(16)
    index.apply("w", stored(1, "sliding_window", kv_cache_spec_sliding_window=17))
    assert blocks(index) == 0
    index.apply("w", stored(0, "full_attention"))
    assert blocks(index) == 2
    index.apply("w", removed(1, 72))
    assert blocks(index) == 1
    index.apply("w", removed(1, 71))
    assert blocks(index) == 0
    index.apply("w", stored(1, "sliding_window", kv_cache_spec_sliding_window=17))
    assert blocks(index) == 2
    index.apply("w", removed(0, 71, 72))
    assert blocks(index) == 0


def test_a_kind_that_is_said_later_counts_from_then() -> None:
    """Events of vLLM do not say it, and name a window's blocks without those behind it."""
    index = PrefixIndex(16)
    index.apply("w", stored(0, None))
    index.apply("w", stored(1, None))
    index.apply("w", declared(0, "mamba"))
    index.apply("w", declared(1, "full_attention"))
    assert blocks(index) == 0
    index.apply("w", stored(0, None, block_hashes=[72]))
    index.apply("w", stored(1, None))
    assert blocks(index) == 2
    assert index.worker_ranks("w")[0].counters.malformed == 0


def test_other_front_doors_learn_of_windows() -> None:
    index, restored = PrefixIndex(16), PrefixIndex(16)
    index.apply("w", stored(0, "full_attention"))
    index.apply("w", stored(1, "mamba", block_hashes=[71]))
    assert blocks(index) == 1
    restored.restore("w", index.snapshot("w"))
    assert blocks(restored) == 1
    restored.apply("w", stored(1, "mamba", block_hashes=[72]))
    assert blocks(restored) == 2


def test_groups_are_written_as_vllm_writes_them() -> None:
    kinds: tuple[dict[str, Any], ...] = (
        {"keeps_prefix": True},
        {"keeps_prefix": False},
        {"keeps_prefix": False, "window": 64},
        {"keeps_prefix": False, "window": 64, "chunked": True},
    )
    for told in kinds:
        events = (
            BlockStored(
                block_hashes=(),
                parent_block_hash=None,
                token_ids=(),
                block_size=16,
                group=3,
                **told,
            ),
            BlockRemoved(block_hashes=(7,), group=3),
        )
        assert (
            decode_batch(encode_batch(EventBatch(timestamp_s=0.0, events=events))).events == events
        )


def test_of_several_that_keep_prefixes_one_is_followed() -> None:
    index = PrefixIndex(16)
    index.apply("w", stored(2, "full_attention"))
    index.apply("w", stored(3, "mla_attention"))
    restored = PrefixIndex(16)
    restored.restore("w", index.snapshot("w"))
    for one in (index, restored):
        one.apply("w", removed(3, 71, 72))
        assert blocks(one) == 2
        one.apply("w", removed(2, 71, 72))
        assert blocks(one) == 0


def test_it_is_said() -> None:
    index = PrefixIndex(16)
    health = EventHealth("w", "tcp://h:1", 16)
    index.apply("w", stored(0, "full_attention"))
    assert health.warnings(0.0, 16, index.worker_ranks("w").values()) == []
    index.apply("w", stored(1, "mamba"))
    assert health.warnings(0.0, 16, index.worker_ranks("w").values()) == []
    index.apply("w", stored(2, "mla_attention"))
    (warning,) = health.warnings(0.0, 16, index.worker_ranks("w").values())
    assert warning.cause is Cause.OTHER_GROUPS
    assert "2 blocks of the others" in warning.message

"""Which events about tiers routers get."""

from __future__ import annotations

from typing import Literal

from tests.support.kv_rig import chain

from commutator.contract.block import BlockDescriptor, BlockRemoved, BlockStored, RetentionHints
from commutator_engine_kit.kv.block_manager.actions import Announce, announced, event_hash

KEYS = chain(1, 4)


def offers(**facts: str) -> list[BlockDescriptor]:
    return [
        BlockDescriptor(
            key=key,
            parent=KEYS[index - 1] if index else None,
            token_ids=(2 * index, 2 * index + 1),
            facts=RetentionHints(**facts),  # type: ignore[arg-type]
        )
        for index, key in enumerate(KEYS)
    ]


def tell(what: Literal["stored", "removed"], blocks: list[BlockDescriptor]) -> list[object]:
    announcement = Announce(what=what, tier=1, medium="NVME", blocks=tuple(blocks))
    return list(announced(announcement, block_size=2))


def test_a_chain_is_one_event() -> None:
    (event,) = tell("stored", offers(tenant="me"))
    assert event == BlockStored(
        block_hashes=tuple(map(event_hash, KEYS)),
        parent_block_hash=None,
        token_ids=tuple(range(8)),
        block_size=2,
        medium="NVME",
        cache_salt="me",
    )


def test_a_gap_begins_another_event() -> None:
    first, _, third, fourth = offers()
    one, two = tell("stored", [first, third, fourth])
    assert isinstance(one, BlockStored)
    assert isinstance(two, BlockStored)
    assert one.block_hashes == (event_hash(KEYS[0]),)
    assert two.block_hashes == (event_hash(KEYS[2]), event_hash(KEYS[3]))
    assert two.parent_block_hash == event_hash(KEYS[1])
    assert two.token_ids == (4, 5, 6, 7)


def test_blocks_without_their_tokens_are_not_announced_but_their_removal_is() -> None:
    first, second, third, _ = offers()
    unknown = BlockDescriptor(key=second.key, parent=None, token_ids=())
    one, two = tell("stored", [first, unknown, third])
    assert isinstance(one, BlockStored)
    assert isinstance(two, BlockStored)
    assert two.parent_block_hash == event_hash(second.key)
    assert tell("removed", [unknown]) == [
        BlockRemoved(block_hashes=(event_hash(second.key),), medium="NVME")
    ]


def test_nothing_is_said_of_nothing() -> None:
    assert tell("stored", []) == []
    assert tell("removed", []) == []


def test_a_hash_is_the_last_64_bits() -> None:
    assert event_hash(bytes(24) + bytes(range(8))) == 0x0001020304050607

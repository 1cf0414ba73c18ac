"""The KV manager's own time for each block, with 10^4, 10^5 and 10^6 blocks in its index.

match: a prompt of 512 blocks that are all there. insert: offered, stored and published, in room
that is free. evict: the same in a full tier, so that each block makes another one leave. A figure
is the least of several rounds; what stands beside it is the same with 10^4 blocks.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256

from bench.result import Figure
from commutator.contract.block import BlockDescriptor, BlockKey, RetentionHints
from commutator.contract.eviction import EvictionPolicy
from commutator.contract.tier import StoredBlock
from commutator_engine_kit.kv.block_manager.actions import StoreBlocks
from commutator_engine_kit.kv.block_manager.block_pool import TierSpec
from commutator_engine_kit.kv.block_manager.manager import BlockManager
from commutator_eviction.arc import Arc
from commutator_eviction.leaf_first import LeafFirst
from commutator_eviction.lru import Lru
from commutator_eviction.s3fifo import S3Fifo
from commutator_eviction.tinylfu import TinyLfu

SIZES = (10_000, 100_000, 1_000_000)
PROMPT_BLOCKS = 512
ROUNDS = 7
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda _: Lru(),
    "tinylfu": TinyLfu,
    "s3fifo": S3Fifo,
    "arc": Arc,
    "leaf_first": lambda _: LeafFirst(),
}


def chain(number: int, blocks: int = PROMPT_BLOCKS) -> list[BlockDescriptor]:
    """A prompt that shares nothing with others."""
    keys = [sha256(f"{number}:{depth}".encode()).digest() for depth in range(blocks)]
    parents: list[BlockKey | None] = [None, *keys]
    return [
        BlockDescriptor(
            key=key,
            parent=parents[depth],
            token_ids=(depth,) * 16,
            facts=RetentionHints(depth=depth),
        )
        for depth, key in enumerate(keys)
    ]


def store(manager: BlockManager, offers: list[BlockDescriptor]) -> None:
    """Offer blocks and let their stores succeed."""
    for action in manager.offer(offers, 0.0):
        if isinstance(action, StoreBlocks):
            written = [
                StoredBlock(key=key, slot=0, size_bytes=1, checksum=0) for key in action.keys
            ]
            manager.finish_store(action.move_id, written, {}, 0.0)


def measure(policy: str, blocks: int) -> dict[str, float]:
    """Microseconds for each block."""
    prompts = blocks // PROMPT_BLOCKS
    capacity = (prompts + ROUNDS) * PROMPT_BLOCKS
    tier = TierSpec(
        name="dram",
        medium="CPU",
        capacity_blocks=capacity,
        eviction=POLICIES[policy],
    )
    manager = BlockManager([tier])
    last: list[BlockDescriptor] = []
    for number in range(prompts):
        last = chain(number)
        store(manager, last)
    keys = [offer.key for offer in last]
    assert len(manager.match(keys)) == PROMPT_BLOCKS
    fresh = [chain(prompts + number) for number in range(2 * ROUNDS)]
    found = {
        "match": min(_us(lambda: manager.match(keys)) for _ in range(3 * ROUNDS)),
        "insert": min(_us(partial(store, manager, offers)) for offers in fresh[:ROUNDS]),
        "evict": min(_us(partial(store, manager, offers)) for offers in fresh[ROUNDS:]),
    }
    evicted = manager.statistics().tiers[0].removed["evicted"]
    assert evicted == ROUNDS * PROMPT_BLOCKS
    return found


def run() -> list[Figure]:
    figures = []
    for policy in POLICIES:
        first: dict[str, float] = {}
        for blocks in SIZES if policy == "lru" else SIZES[:2]:
            found = measure(policy, blocks)
            gc.collect()
            first = first or found
            figures += [
                Figure(
                    scenario="kv_manager",
                    what=f"{what} a block, {policy}, index of {blocks:,}",
                    ours=value,
                    other=first[what] if blocks > SIZES[0] else None,
                    unit="us",
                    other_name=f"index of {SIZES[0]:,}",
                    higher_is_better=False,
                )
                for what, value in found.items()
            ]
    return figures


def _us(call: Callable[[], object]) -> float:
    started_s = time.thread_time()
    call()
    return (time.thread_time() - started_s) / PROMPT_BLOCKS * 1e6

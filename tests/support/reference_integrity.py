"""Whether the reference engine's accounting of blocks is right; linear in the number of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commutator import RetentionHints
from commutator.contract.block import BlockDescriptor, CacheIdentity, next_key
from commutator_reference.block_pool import NOTHING, BlockPool
from commutator_reference.engine import ReferenceEngine
from commutator_reference.scheduler import ANONYMOUS, Scheduler

__all__ = ["chain_of", "check_engine", "check_pool", "check_scheduler"]


def chain_of(
    contents: Iterable[Sequence[int]], namespace: CacheIdentity = ANONYMOUS
) -> list[BlockDescriptor]:
    """The blocks of a prompt whose blocks have these tokens."""
    chain: list[BlockDescriptor] = []
    for tokens in contents:
        parent = chain[-1].key if chain else None
        chain.append(
            BlockDescriptor(
                key=next_key(parent or namespace.digest, tokens),
                parent=parent,
                token_ids=tuple(tokens),
                facts=RetentionHints(tenant=namespace.cache_salt, depth=len(chain)),
                adapter=namespace.adapter,
            )
        )
    return chain


def check_engine(engine: ReferenceEngine) -> None:
    """Raise AssertionError when it is wrong; from the driving thread."""
    elsewhere: list[int] = []
    if (handed := engine._handover) is not None:
        elsewhere += handed.exports._exporter.held()
        for pull in handed.pulls._pulls.values():
            elsewhere += [*pull.chain, *pull.blocks]
    if (tiers := engine._tiering) is not None:
        elsewhere += tiers._loading_blocks
        for load in tiers._loads.values():
            elsewhere += load.hits
    check_scheduler(engine._scheduler, elsewhere)


def check_scheduler(scheduler: Scheduler, elsewhere: Iterable[int] = ()) -> None:
    """``elsewhere``: blocks held in addition to those of running requests."""
    pool, running, waiting = scheduler.pool, scheduler._running, scheduler._waiting
    check_pool(pool)
    assert len(running) <= scheduler._max_running, "too many requests run"
    assert len(running) + len(waiting) == len(scheduler._sequences), "a request is lost"
    assert all(not any(sequence.tables) for sequence in waiting), "a waiting one holds blocks"
    held = {
        block
        for sequence in running.values()
        for table in sequence.tables
        for block in table
        if block != NOTHING
    }
    assert len(held.union(elsewhere)) == pool.held, "a block is held by no request"


def check_pool(pool: BlockPool) -> None:
    """Raise AssertionError when a block is in no state, or in two."""
    free, cached = set(pool._free), set(pool._cached)
    held = {block for block, count in enumerate(pool._references) if count > 0}
    assert not free & set(pool._lent), "a block that is being copied is free"
    assert len(free) == len(pool._free), "a block is free twice"
    assert not free & cached, "a block is free and cached"
    assert free | cached | held == set(range(pool.num_blocks)), "a block is lost"
    assert not held & (free | cached), "a held block can be reallocated"
    assert min(pool._references, default=0) >= 0, "a negative reference count"
    registered = {b: i for b, i in enumerate(pool._registered) if i is not None}
    assert cached <= set(registered), "a cached block has no content"
    assert not free & set(registered), "a free block has content"
    assert pool._by_key == {i.key: b for b, i in registered.items()}, "index differs"
    for content in () if pool.has_tiers else registered.values():
        parent = content.parent
        assert parent is None or parent in pool._by_key, "a parent is not registered"

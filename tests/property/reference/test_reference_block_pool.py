"""The block pool against a model of it: no block is lost, only equal blocks are shared."""

from __future__ import annotations

from functools import partial

from attrs import evolve
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.reference_integrity import chain_of, check_pool

from commutator.contract.block import BlockRemoved, BlocksCleared, BlockStored, CacheIdentity
from commutator_engine_kit.kv import event_hash
from commutator_reference.block_pool import BlockPool
from commutator_reference.scheduler import ANONYMOUS

BLOCK_SIZE = 2
# Few tokens and salts, so that prompts share prefixes often.
blocks_of_tokens = st.lists(st.tuples(*[st.integers(0, 1)] * BLOCK_SIZE), min_size=1, max_size=5)
namespaces = st.builds(
    partial(evolve, ANONYMOUS),
    adapter=st.sampled_from([None, "a"]),
    cache_salt=st.sampled_from([None, "a", "salt"]),
)


class BlockPoolMachine(RuleBasedStateMachine):
    """Requests come with chains of blocks, compute what is not cached, and leave."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.holders: list[list[int]] = []
        # What is in each block's memory, written only by the request that computed it.
        self.memory: dict[int, tuple[CacheIdentity, tuple[tuple[int, ...], ...]]] = {}
        self.announced: set[int] = set()

    @rule(namespace=namespaces, contents=blocks_of_tokens)
    def come(self, namespace: CacheIdentity, contents: list[tuple[int, ...]]) -> None:
        chain = chain_of(contents, namespace)
        held: list[int] = []
        for index, wanted_block in enumerate(chain):
            block = self.pool.find(wanted_block)
            if block is None:
                break
            wanted = (namespace, tuple(contents[: index + 1]))
            assert self.memory[block] == wanted, "a block of another content was served"
            self.pool.acquire(block)
            held.append(block)
        hits = len(held)
        available = self.pool.available
        fresh = self.pool.allocate(len(chain) - hits)
        if fresh is None:
            assert len(chain) - hits > available
            self.pool.release(held)
            return
        for index, block in enumerate(fresh, start=hits):
            self.memory[block] = (namespace, tuple(contents[: index + 1]))
        held += fresh
        for index in range(hits, len(chain)):
            held[index] = self.pool.register(held[index], chain[index])
            assert self.memory[held[index]] == (namespace, tuple(contents[: index + 1]))
        self.holders.append(held)

    @rule(count=st.integers(0, 4))
    def come_with_unfinished_blocks(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if blocks is not None:
            for block in blocks:
                self.memory.pop(block, None)
            self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index))

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        assert self.pool.cached == 0

    @invariant()
    def books_balance(self) -> None:
        check_pool(self.pool)
        held = {block for blocks in self.holders for block in blocks}
        assert self.pool.held == len(held)
        assert self.pool.available == self.pool.num_blocks - len(held)

    @invariant()
    def events_tell_the_truth(self) -> None:
        for event in self.pool.take_events():
            match event:
                case BlockStored(
                    block_hashes=hashes, parent_block_hash=parent, token_ids=token_ids
                ):
                    assert parent is None or parent in self.announced, "an orphan was announced"
                    assert len(token_ids) == BLOCK_SIZE * len(hashes)
                    assert not self.announced & set(hashes), "stored twice"
                    self.announced |= {h for h in hashes if isinstance(h, int)}
                case BlockRemoved(block_hashes=hashes):
                    assert set(hashes) <= self.announced, "removed but never stored"
                    self.announced -= {h for h in hashes if isinstance(h, int)}
                case BlocksCleared():
                    self.announced.clear()
        indexed = {event_hash(content.key) for content in self.pool._registered if content}
        assert self.announced == indexed

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for blocks in self.holders:
                self.pool.release(blocks)
            assert self.pool.held == 0
            self.pool.clear()
            assert self.pool.cached == 0
            check_pool(self.pool)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

"""Which KV blocks are held, which are cached, which are free. No tensors: numbers only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from commutator.kv import (
    PLAIN,
    BlockFacts,
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    KvEvent,
    is_stronger,
)
from commutator_reference.block_identity import BlockIdentity

__all__ = ["BlockPool"]


class BlockPool:
    """Reference-counted blocks with a prefix cache over the full ones.

    A block is *held* (one request or more refer to it), *cached* (nobody refers to it, but its
    content can be reused) or *free*. Cached blocks are given away only when no free one is left,
    the one released longest ago first. A cached block's parent is always held or cached too, but
    for blocks that are copied to a tier while their parents are given away.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
    ) -> None:
        self.on_registered: Callable[[int, BlockIdentity], None] = lambda *_: None
        """Told of each block whose content became reusable."""
        self.on_reused: Callable[[int, BlockIdentity], None] = lambda *_: None
        """Told of each block that another request uses."""
        self.taken = 0
        """How many blocks were ever given by ``allocate``."""
        self.has_tiers = False
        """Whether blocks that are forgotten here may still be elsewhere."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._identities: list[BlockIdentity | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        self._facts = [PLAIN] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._lent: dict[int, int] = {}
        self._generations = [0] * num_blocks
        self._events: list[KvEvent] = []

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` can give: free ones, and cached ones that nobody copies."""
        return len(self._free) + len(self._cached) - sum(b in self._cached for b in self._lent)

    @property
    def held(self) -> int:
        """Blocks that requests refer to."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks that nobody refers to and whose content can be reused."""
        return len(self._cached)

    def is_held(self, block: int) -> bool:
        """Whether any request refers to the block."""
        return self._references[block] > 0

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks, each held once, or None when there are not as many."""
        if count > self.available:
            return None
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def find(self, identity: BlockIdentity) -> int | None:
        """The block with exactly this identity, or None. Changes nothing."""
        block = self._by_digest.get(identity.digest)
        if block is None or self._identities[block] != identity:
            return None
        return block

    def acquire(self, block: int) -> None:
        """Hold a block that ``find`` returned."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def reuse(self, block: int) -> None:
        """A request holds a registered block instead of computing it."""
        self.acquire(block)
        identity = self._identities[block]
        assert identity is not None
        self.on_reused(block, identity)

    def register(self, block: int, identity: BlockIdentity, facts: BlockFacts = PLAIN) -> int:
        """Make a held, fully computed block reusable; its parent must be registered.

        Returns the block to use from now on: when another block has the same identity already,
        that one is acquired and ``block`` released, so that content is never stored twice.
        """
        if not self.prefix_caching:
            return block
        if identity.digest in self._by_digest:
            twin = self.find(identity)
            if twin is None or twin == block:
                return block
            self.keep(twin, facts)
            self.reuse(twin)
            self.release([block])
            return twin
        self._identities[block], self._facts[block] = identity, facts
        self._by_digest[identity.digest] = block
        self._stored(identity)
        self.on_registered(block, identity)
        return block

    def keep(self, block: int, facts: BlockFacts) -> None:
        """A registered block is used by somebody who asks to keep it, perhaps for longer."""
        identity = self._identities[block]
        if identity is not None and is_stronger(facts, self._facts[block]):
            self._facts[block] = facts
            self.on_registered(block, identity)

    def facts(self, block: int) -> BlockFacts:
        """What was asked for a registered block."""
        return self._facts[block]

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a request's blocks, given in the order of its tokens."""
        # Backwards, so that a child is given away before its parent.
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise ValueError(f"block {block} is not held")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._identities[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def clear(self) -> None:
        """Forget the content of every block that nobody holds."""
        gone = [block for block in self._cached if block not in self._lent]
        removed = [self._forget(block) for block in gone]
        self._free.extend(gone)
        for block in gone:
            del self._cached[block]
        if self._by_digest or self.has_tiers:
            self._removed(removed)
        else:
            self._events.append(BlocksCleared())

    def abandon(self) -> list[KvEvent]:
        """The last events of a pool that will not be used again: all that it had is gone."""
        registered = [identity for identity in self._identities if identity is not None]
        events = self.take_events()
        if not self.has_tiers:
            return [*events, BlocksCleared()]
        self._removed(registered)
        return events + self.take_events()

    def oldest_cached(self, count: int) -> list[tuple[int, BlockIdentity]]:
        """Up to ``count`` cached blocks that are not lent, in the order they are given away in."""
        oldest = []
        unlent = (block for block in self._cached if block not in self._lent)
        for block in islice(unlent, count):
            identity = self._identities[block]
            assert identity is not None
            oldest.append((block, identity))
        return oldest

    @property
    def free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    def lend(self, block: int) -> None:
        """Somebody copies a registered block: it is not given away until ``take_back``. Counted."""
        self._lent[block] = self._lent.get(block, 0) + 1

    def generation(self, block: int) -> int:
        """A number that changes when the block's registered content is forgotten."""
        return self._generations[block]

    def take_back(self, block: int) -> None:
        """A copy that ``lend`` began is over."""
        self._lent[block] -= 1
        if not self._lent[block]:
            del self._lent[block]

    def take_events(self) -> list[KvEvent]:
        """What changed in the cache since the last call."""
        events, self._events = self._events, []
        return events

    def _take(self) -> int:
        self.taken += 1
        if self._free:
            return self._free.pop()
        block = next(block for block in self._cached if block not in self._lent)
        del self._cached[block]
        self._removed([self._forget(block)])
        return block

    def _forget(self, block: int) -> BlockIdentity:
        identity = self._identities[block]
        assert identity is not None
        self._identities[block] = None
        self._generations[block] += 1
        del self._by_digest[identity.digest]
        return identity

    def _stored(self, identity: BlockIdentity) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == identity.parent_event_hash:
            hashes = (*last.block_hashes, identity.event_hash)
            parent, token_ids = last.parent_block_hash, last.token_ids + identity.token_ids
            self._events.pop()
        else:
            hashes = (identity.event_hash,)
            parent, token_ids = identity.parent_event_hash, identity.token_ids
        space = identity.namespace
        stored = BlockStored(
            hashes,
            parent,
            token_ids,
            self.block_size,
            lora_name=space.lora_name,
            cache_salt=space.cache_salt,
        )
        self._events.append(stored)

    def _removed(self, identities: Iterable[BlockIdentity]) -> None:
        hashes = tuple(identity.event_hash for identity in identities)
        if hashes:
            self._events.append(BlockRemoved(hashes))

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not balance. Linear in the number of blocks."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, count in enumerate(self._references) if count > 0}
        assert not free & set(self._lent), "a block that is being copied is free"
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        assert free | cached | held == set(range(self.num_blocks)), "a block is lost"
        assert not held & (free | cached), "a held block can be given away"
        assert min(self._references, default=0) >= 0, "a negative reference count"
        registered = {b: i for b, i in enumerate(self._identities) if i is not None}
        assert cached <= set(registered), "a cached block has no identity"
        assert not free & set(registered), "a free block has an identity"
        assert self._by_digest == {i.digest: b for b, i in registered.items()}, "index differs"
        for identity in () if self.has_tiers else registered.values():
            has_parent = identity.is_first or identity.parent_digest in self._by_digest
            assert has_parent, "a registered block's parent is not registered"

"""The block pool: which KV blocks are held, cached or free, and what makes two of them the same.

Block numbers only, no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from attrs import frozen

from commutator import RetentionHints
from commutator.contract.block import (
    PLAIN,
    BlockDescriptor,
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    CacheIdentity,
    KvEvent,
    is_stronger,
    next_key,
)
from commutator_engine_kit.kv import event_hash

__all__ = ["ANONYMOUS", "BlockIdentity", "BlockPool"]

ANONYMOUS = CacheIdentity(model="", weights="", tokenizer="", dtype="", layout="", block_size=0)
"""Enough where blocks never leave the engine."""


@frozen
class BlockIdentity:
    """A full block's tokens, every token before them, and the namespace of its request."""

    namespace: CacheIdentity
    """Requests share KV blocks only within one namespace, which includes adapter and salt."""
    parent_digest: bytes | None
    """The previous block's digest; None for the first block."""
    token_ids: tuple[int, ...]
    digest: bytes
    """SHA-256 over the parent's digest and the token ids as little-endian 64-bit integers.

    The first block's parent is the namespace.
    """

    @classmethod
    def first(cls, namespace: CacheIdentity, token_ids: Sequence[int]) -> BlockIdentity:
        """The identity of a prompt's first block."""
        return cls(namespace, None, tuple(token_ids), next_key(namespace.digest, token_ids))

    def child(self, token_ids: Sequence[int]) -> BlockIdentity:
        """The identity of the block that follows this one."""
        digest = next_key(self.digest, token_ids)
        return BlockIdentity(self.namespace, self.digest, tuple(token_ids), digest)


class BlockPool:
    """Reference-counted blocks with a prefix cache over the full ones.

    A block is *held* (one request or more use it), *cached* (no request uses it, but its
    content can be reused) or *free*. Cached blocks are reallocated only when no free one is left,
    least recently released first. A cached block's parent is always held or cached too, except
    for blocks that are copied to a tier while their parents are reallocated.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.on_registered: Callable[[int, BlockIdentity], None] = lambda *_: None
        """Called for each block whose content becomes reusable."""
        self.on_reused: Callable[[int, BlockIdentity], None] = lambda *_: None
        """Called for each block that another request reuses."""
        self.taken = 0
        """Number of blocks that ``allocate`` has returned so far."""
        self.has_tiers = False
        """Whether blocks dropped here may still be in a tier."""
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
        """Blocks that ``allocate`` can return: free ones, and cached ones that are not lent."""
        return len(self._free) + len(self._cached) - sum(b in self._cached for b in self._lent)

    @property
    def held(self) -> int:
        """Blocks that requests use."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks that no request uses and whose content can be reused."""
        return len(self._cached)

    def in_flight(self, block: int) -> bool:
        """Whether any request uses the block."""
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

    def find_prefix(self, identities: Iterable[BlockIdentity]) -> list[int]:
        """The blocks of the first identities, up to the first one that is not here."""
        blocks: list[int] = []
        for identity in identities:
            if (block := self.find(identity)) is None:
                break
            blocks.append(block)
        return blocks

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

    def register(self, block: int, identity: BlockIdentity, facts: RetentionHints = PLAIN) -> int:
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

    def adopt(self, block: int, identity: BlockIdentity, facts: RetentionHints) -> int:
        """Make a held block reusable whose content was loaded; returns the block to hold.

        That is another one, held from now on, if its content was computed or loaded there
        meanwhile. ``block`` stays held, because a transfer may still write to it.
        """
        if (twin := self.find(identity)) is None:
            return self.register(block, identity, facts)
        self.acquire(twin)
        return twin

    def keep(self, block: int, facts: RetentionHints) -> None:
        """Replace the retention hints of a registered block if ``facts`` are stronger."""
        identity = self._identities[block]
        if identity is not None and is_stronger(facts, self._facts[block]):
            self._facts[block] = facts
            self.on_registered(block, identity)

    def descriptor(self, block: int) -> BlockDescriptor:
        """A registered block as it is offered to storage tiers."""
        identity = self._identities[block]
        assert identity is not None
        return BlockDescriptor(
            key=identity.digest,
            parent=identity.parent_digest,
            token_ids=identity.token_ids,
            facts=self._facts[block],
            adapter=identity.namespace.adapter,
        )

    def release(self, blocks: Sequence[int]) -> None:
        """Release a request's blocks, given in the order of its tokens."""
        # Backwards, so that a child is reallocated before its parent.
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
        """Drop the content of every block that is not held."""
        gone = [block for block in self._cached if block not in self._lent]
        removed = [self._forget(block) for block in gone]
        self._free.extend(gone)
        for block in gone:
            del self._cached[block]
        if self._by_digest or self.has_tiers:
            self._removed(removed)
        else:
            self._events.append(BlocksCleared())

    def oldest_cached(self, count: int) -> list[tuple[int, BlockIdentity]]:
        """Up to ``count`` cached blocks that are not lent, in the order of reallocation."""
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
        """A registered block is being copied: not reallocated until ``take_back``. Counted."""
        self._lent[block] = self._lent.get(block, 0) + 1

    def generation(self, block: int) -> int:
        """A number that changes when the block's registered content is dropped."""
        return self._generations[block]

    def take_back(self, block: int) -> None:
        """A copy that ``lend`` began has ended."""
        self._lent[block] -= 1
        if not self._lent[block]:
            del self._lent[block]

    def take_events(self) -> list[KvEvent]:
        """KV events of the cache since the last call."""
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
        digest = identity.parent_digest
        parent: int | bytes | None = None if digest is None else event_hash(digest)
        hashes: tuple[int | bytes, ...] = (event_hash(identity.digest),)
        token_ids = identity.token_ids
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            hashes, token_ids = last.block_hashes + hashes, last.token_ids + token_ids
            parent = last.parent_block_hash
            self._events.pop()
        space = identity.namespace
        stored = BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=token_ids,
            block_size=self.block_size,
            adapter=space.adapter,
            cache_salt=space.cache_salt,
        )
        self._events.append(stored)

    def _removed(self, identities: Iterable[BlockIdentity]) -> None:
        hashes = tuple(event_hash(identity.digest) for identity in identities)
        if hashes:
            self._events.append(BlockRemoved(block_hashes=hashes))

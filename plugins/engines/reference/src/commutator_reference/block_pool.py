"""The block pool: which KV blocks are held, cached or free. Block numbers only, no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from attrs import evolve

from commutator import BlockKey, RetentionHints
from commutator.contract.block import (
    BlockDescriptor,
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    KvEvent,
    is_stronger,
)
from commutator_engine_kit.kv import KvGroup, beside, event_hash

NOTHING = -1
"""In a table of blocks: one that is not needed, or no longer."""


class BlockPool:
    """Reference-counted blocks with a prefix cache over the full ones.

    A block is *held* (one request or more use it), *cached* (no request uses it, but its
    content can be reused) or *free*. Cached blocks are reallocated only when no free one is left,
    least recently released first. A cached block's parent is always held or cached too, except
    for blocks that are copied to a tier while their parents are reallocated.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        groups: Sequence[KvGroup] = (),
    ) -> None:
        """``groups``: the model's kinds of KV, by ``BlockDescriptor.group``."""
        self.on_registered: Callable[[int, BlockDescriptor], None] = lambda *_: None
        """Called for each block whose content becomes reusable."""
        self.on_reused: Callable[[int, BlockDescriptor], None] = lambda *_: None
        """Called for each block that another request reuses."""
        self.taken = 0
        """Number of blocks that ``allocate`` has returned so far."""
        self.has_tiers = False
        """Whether blocks dropped here may still be in a tier."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._registered: list[BlockDescriptor | None] = [None] * num_blocks
        self._by_key: dict[BlockKey, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._lent: dict[int, int] = {}
        self._generations = [0] * num_blocks
        self._events: list[KvEvent] = []
        self._groups = groups

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

    def find(self, wanted: BlockDescriptor) -> int | None:
        """The block with exactly this content, or None. Changes nothing."""
        block = self._by_key.get(wanted.key)
        if block is None or _content(self.descriptor(block)) != _content(wanted):
            return None
        return block

    def find_prefix(self, chain: Iterable[BlockDescriptor]) -> list[int]:
        """The blocks of a chain, up to the first one that is not here."""
        blocks: list[int] = []
        for wanted in chain:
            if (block := self.find(wanted)) is None:
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
        self.on_reused(block, self.descriptor(block))

    def register(self, block: int, content: BlockDescriptor) -> int:
        """Make a held, fully computed block reusable; its parent must be registered.

        Returns the block to use from now on: when another block has the same content already,
        that one is acquired and ``block`` released, so that content is never stored twice.
        """
        if not self.prefix_caching:
            return block
        if content.key in self._by_key:
            twin = self.find(content)
            if twin is None or twin == block:
                return block
            self.keep(twin, content.facts)
            self.reuse(twin)
            self.release([block])
            return twin
        self._registered[block] = content
        self._by_key[content.key] = block
        if content.token_ids:
            self._stored(content)
        elif content.stands_beside is not None:
            self._stored_beside(content.group, content.stands_beside)
        self.on_registered(block, content)
        return block

    def adopt(self, block: int, content: BlockDescriptor) -> int:
        """Make a held block reusable whose content was loaded; returns the block to hold.

        That is another one, held from now on, if its content was computed or loaded there
        meanwhile. ``block`` stays held, because a transfer may still write to it.
        """
        if (twin := self.find(content)) is None:
            return self.register(block, content)
        self.acquire(twin)
        return twin

    def keep(self, block: int, facts: RetentionHints) -> None:
        """Replace the retention hints of a registered block if ``facts`` are stronger."""
        content = self._registered[block]
        if content is not None and is_stronger(facts, content.facts):
            self._registered[block] = content = evolve(content, facts=facts)
            self.on_registered(block, content)

    def descriptor(self, block: int) -> BlockDescriptor:
        """What is in a registered block."""
        content = self._registered[block]
        assert content is not None
        return content

    def release(self, blocks: Sequence[int]) -> None:
        """Release a request's blocks, given in the order of its tokens."""
        # Backwards, so that a child is reallocated before its parent.
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise ValueError(f"block {block} is not held")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._registered[block] is None:
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
        if self._by_key or self.has_tiers:
            self._removed(removed)
        else:
            self._events.append(BlocksCleared())

    def oldest_cached(self, count: int) -> list[int]:
        """Up to ``count`` cached blocks that are not lent, in the order of reallocation."""
        return list(islice((block for block in self._cached if block not in self._lent), count))

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

    def _forget(self, block: int) -> BlockDescriptor:
        content = self.descriptor(block)
        self._registered[block] = None
        self._generations[block] += 1
        del self._by_key[content.key]
        return content

    def _stored(self, content: BlockDescriptor) -> None:
        parent: int | bytes | None
        parent = None if content.parent is None else event_hash(content.parent)
        hashes: tuple[int | bytes, ...] = (event_hash(content.key),)
        token_ids = content.token_ids
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            hashes, token_ids = last.block_hashes + hashes, last.token_ids + token_ids
            parent = last.parent_block_hash
            self._events.pop()
        stored = BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=token_ids,
            block_size=self.block_size,
            adapter=content.adapter,
            cache_salt=content.facts.tenant,
        )
        self._events.append(stored)

    def _stored_beside(self, group: int, key: BlockKey) -> None:
        """A window's block, or a state, by the block of the same tokens that routers follow."""
        stored = beside(self._groups[group], group, (key,))
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.group == group:
            self._events[-1] = evolve(last, block_hashes=last.block_hashes + stored.block_hashes)
        else:
            self._events.append(stored)

    def _removed(self, contents: Iterable[BlockDescriptor]) -> None:
        contents = list(contents)
        for each in contents:
            if each.stands_beside is not None:
                name = event_hash(each.stands_beside)
                self._events.append(BlockRemoved(block_hashes=(name,), group=each.group))
        announced = (each for each in contents if each.token_ids)
        if hashes := tuple(event_hash(each.key) for each in announced):
            self._events.append(BlockRemoved(block_hashes=hashes))


def _content(block: BlockDescriptor) -> tuple[object, ...]:
    """All but what each request wants for itself."""
    return block.key, block.parent, block.token_ids, block.adapter

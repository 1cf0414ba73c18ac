"""Turns the model's block events into the KV events that engines publish."""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import Sequence

from attrs import define, evolve
from xxhash import xxh3_64_intdigest

from commutator.contract.block import BlockRemoved, BlockStored, KvEvent
from commutator_engine_kit import EventPublisher
from commutator_sim.events import DEVICE, Offloaded, Removed, Stored


def root_key(adapter: str | None, cache_salt: str | None) -> int:
    """The parent of a request's first block: equal only for requests that may share KV."""
    if adapter is None and cache_salt is None:
        return 0
    return xxh3_64_intdigest(repr((adapter, cache_salt)).encode())


def block_keys(token_ids: Sequence[int], block_size: int, root: int) -> list[int]:
    """Unsigned 64-bit keys of the full blocks of ``token_ids``; other engines have other keys.

    Raises OverflowError for a token id below 0 or over 32 bits.
    """
    data = array("I", token_ids).tobytes()
    size = block_size * 4
    key, keys = root, []
    for (block,) in struct.iter_unpack(f"{size}s", data[: len(data) // size * size]):
        key = xxh3_64_intdigest(block, key)
        keys.append(key)
    return keys


_MEDIUM = {DEVICE: "GPU", "host": "CPU", "disk": "DISK", "object": "EXTERNAL"}


@define
class _Block:
    """A block in some tier; the event of each further tier repeats the block's contents."""

    stored: BlockStored
    places: int = 1
    """Number of tiers that store it, including the device."""


@define
class _Stored:
    """Blocks of one request that several ticks stored; they are published as one event."""

    keys: list[int]
    parent: int | None
    token_ids: list[int]
    adapter: str | None
    cache_salt: str | None
    next_block: int

    def event(self, block_size: int) -> BlockStored:
        return BlockStored(
            block_hashes=tuple(self.keys),
            parent_block_hash=self.parent,
            token_ids=tuple(self.token_ids),
            block_size=block_size,
            adapter=self.adapter,
            cache_salt=self.cache_salt,
        )


class EventFeed:
    """Collects the events of one tick or several and publishes them as one message."""

    def __init__(
        self,
        publisher: EventPublisher,
        block_size: int,
        *,
        has_tiers: bool,
        gather_s: float = 0.0,
    ) -> None:
        """Events of ``gather_s`` seconds are one message; above 0 that needs an event loop."""
        self._publisher = publisher
        self._block_size = block_size
        self._has_tiers = has_tiers
        self._blocks: dict[int, _Block] = {}
        """The blocks of all tiers; empty where there is only the device."""
        self._gather_s = gather_s
        self._timer: asyncio.TimerHandle | None = None
        self._ready: list[KvEvent | _Stored] = []
        self._stored: dict[int, _Stored] = {}
        """The last one of each request in ``_ready``."""
        self._removals: dict[str, list[int]] = {}
        """Removed blocks by medium; one event at the end of the message holds all of them."""
        self._removed: set[int] = set()
        """The blocks of ``_removals``."""

    def stored(
        self,
        event: Stored,
        keys: Sequence[int],
        token_ids: Sequence[int],
        adapter: str | None,
        cache_salt: str | None,
    ) -> None:
        """Blocks of a request with these keys and tokens are on the device."""
        first, size = event.first_block, self._block_size
        next_block = first + len(event.blocks)
        parent = keys[first - 1] if first else None
        tokens = token_ids[first * size : next_block * size]
        self._add_removals_before(event.blocks)
        before = self._stored.get(event.key)
        if before and before.next_block == first:
            before.keys += event.blocks
            before.token_ids += tokens
            before.next_block = next_block
        else:
            self._stored[event.key] = _Stored(
                list(event.blocks), parent, list(tokens), adapter, cache_salt, next_block
            )
            self._ready.append(self._stored[event.key])
        if not self._has_tiers:
            return
        for index, key in enumerate(event.blocks):
            if (block := self._blocks.get(key)) is not None:
                block.places += 1
            else:
                own = list(tokens[index * size : (index + 1) * size])
                stored = _Stored([key], parent, own, adapter, cache_salt, first + index + 1)
                self._blocks[key] = _Block(stored.event(size))
            parent = key

    def moved(self, event: Offloaded | Removed) -> None:
        """Blocks were stored in a tier behind the device, or removed from a tier or the device."""
        medium = _MEDIUM[event.tier]
        if isinstance(event, Removed):
            self._removals.setdefault(medium, []).extend(event.blocks)
            self._removed.update(event.blocks)
            for key in event.blocks if self._has_tiers else ():
                block = self._blocks[key]
                block.places -= 1
                if not block.places:
                    del self._blocks[key]
            return
        self._add_removals_before(event.blocks)
        for key in event.blocks:
            block = self._blocks[key]
            block.places += 1
            self._ready.append(evolve(block.stored, medium=medium))

    def publish(self) -> None:
        """Send the collected events, now or ``gather_s`` after the first of them."""
        if not self._gather_s:
            self.flush()
        elif (self._ready or self._removed) and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._gather_s, self.flush)

    def flush(self) -> None:
        """Send the collected events now."""
        self._timer = None
        self._add_removals()
        ready, self._ready = self._ready, []
        size = self._block_size
        self._publisher.publish(
            [one.event(size) if isinstance(one, _Stored) else one for one in ready]
        )

    def _add_removals_before(self, blocks: Sequence[int]) -> None:
        """Where ``blocks`` were removed and are stored again, the removal must come first."""
        if not self._removed.isdisjoint(blocks):
            self._add_removals()

    def _add_removals(self) -> None:
        self._ready += [
            BlockRemoved(block_hashes=tuple(gone), medium=where)
            for where, gone in self._removals.items()
        ]
        self._removals.clear()
        self._removed.clear()
        self._stored.clear()

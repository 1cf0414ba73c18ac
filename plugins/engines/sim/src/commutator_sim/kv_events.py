"""Turns the model's block events into the KV events that engines publish."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from attrs import define

from commutator.kv import BlockRemoved, BlockStored, EventPublisher, KvEvent
from commutator_sim.events import DEVICE, Offloaded, Removed, Stored

__all__ = ["EventFeed"]

_MEDIUM = {DEVICE: "GPU", "host": "CPU", "disk": "DISK", "object": "EXTERNAL"}


@define
class _Block:
    """What an event about an offloaded block has to say again."""

    parent: int | None
    token_ids: tuple[int, ...]
    lora_name: str | None
    cache_salt: str | None
    places: int = 1
    """In how many tiers it is, the device included."""


@define
class _Stored:
    """What became of one request's blocks since the last message: one event, however many ticks."""

    keys: list[int]
    parent: int | None
    token_ids: list[int]
    lora_name: str | None
    cache_salt: str | None
    next_block: int

    def event(self, block_size: int) -> BlockStored:
        return BlockStored(
            tuple(self.keys),
            self.parent,
            tuple(self.token_ids),
            block_size,
            lora_name=self.lora_name,
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
        """What ticks tell within ``gather_s`` goes out together; it needs an event loop."""
        self._publisher = publisher
        self._block_size = block_size
        self._blocks: dict[int, _Block] | None = {} if has_tiers else None
        self._gather_s = gather_s
        self._timer: asyncio.TimerHandle | None = None
        self._ready: list[KvEvent | _Stored] = []
        self._stored: dict[int, _Stored] = {}
        """The last of each request among what is ready."""
        self._removals: dict[str, list[int]] = {}
        """By medium. They wait for the end of the message, where one event tells of many."""
        self._removed: set[int] = set()
        """All of their blocks."""

    def stored(
        self,
        event: Stored,
        keys: Sequence[int],
        token_ids: Sequence[int],
        lora_name: str | None,
        cache_salt: str | None,
    ) -> None:
        """Blocks of a request with these keys and tokens are on the device."""
        first, size = event.first_block, self._block_size
        next_block = first + len(event.blocks)
        parent = keys[first - 1] if first else None
        tokens = token_ids[first * size : next_block * size]
        self._settle(event.blocks)
        before = self._stored.get(event.key)
        if before and before.next_block == first:
            before.keys += event.blocks
            before.token_ids += tokens
            before.next_block = next_block
        else:
            stored = _Stored(
                list(event.blocks), parent, list(tokens), lora_name, cache_salt, next_block
            )
            self._stored[event.key] = stored
            self._ready.append(stored)
        if self._blocks is None:
            return
        for index, key in enumerate(event.blocks):
            if (block := self._blocks.get(key)) is not None:
                block.places += 1
            else:
                mine = tuple(tokens[index * size : (index + 1) * size])
                self._blocks[key] = _Block(parent, mine, lora_name, cache_salt)
            parent = key

    def moved(self, event: Offloaded | Removed) -> None:
        """Blocks came to a tier behind the device, or left any."""
        medium = _MEDIUM[event.tier]
        if isinstance(event, Removed):
            self._removals.setdefault(medium, []).extend(event.blocks)
            self._removed.update(event.blocks)
            if self._blocks is not None:
                self._forget(event.blocks, self._blocks)
            return
        assert self._blocks is not None
        self._settle(event.blocks)
        for key in event.blocks:
            block = self._blocks[key]
            block.places += 1
            stored = BlockStored(
                (key,),
                block.parent,
                block.token_ids,
                self._block_size,
                lora_name=block.lora_name,
                medium=medium,
                cache_salt=block.cache_salt,
            )
            self._ready.append(stored)

    def publish(self) -> None:
        """Send what was collected, now or when it has been gathered for long enough."""
        if not self._gather_s:
            self.flush()
        elif (self._ready or self._removed) and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._gather_s, self.flush)

    def flush(self) -> None:
        """Send what was collected now."""
        self._timer = None
        self._tell_removals()
        ready, self._ready = self._ready, []
        size = self._block_size
        self._publisher.publish(
            [one.event(size) if isinstance(one, _Stored) else one for one in ready]
        )

    def _settle(self, blocks: Sequence[int]) -> None:
        """Blocks that went meanwhile must not come back before they go."""
        if not self._removed.isdisjoint(blocks):
            self._tell_removals()

    def _tell_removals(self) -> None:
        self._ready += [BlockRemoved(tuple(gone), where) for where, gone in self._removals.items()]
        self._removals.clear()
        self._removed.clear()
        self._stored.clear()

    def _forget(self, keys: Sequence[int], blocks: dict[int, _Block]) -> None:
        for key in keys:
            block = blocks[key]
            block.places -= 1
            if not block.places:
                del blocks[key]

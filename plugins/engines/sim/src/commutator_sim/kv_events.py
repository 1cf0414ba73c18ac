"""Turns the model's block events into the KV events that engines publish."""

from __future__ import annotations

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


class EventFeed:
    """Collects the events of one tick and publishes them as one message."""

    def __init__(self, publisher: EventPublisher, block_size: int, *, has_tiers: bool) -> None:
        self._publisher = publisher
        self._block_size = block_size
        self._blocks: dict[int, _Block] | None = {} if has_tiers else None
        self._ready: list[KvEvent] = []

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
        parent = keys[first - 1] if first else None
        tokens = tuple(token_ids[first * size : (first + len(event.blocks)) * size])
        stored = BlockStored(
            event.blocks, parent, tokens, size, lora_name=lora_name, cache_salt=cache_salt
        )
        self._ready.append(stored)
        if self._blocks is None:
            return
        for index, key in enumerate(event.blocks):
            if (block := self._blocks.get(key)) is not None:
                block.places += 1
            else:
                mine = tokens[index * size : (index + 1) * size]
                self._blocks[key] = _Block(parent, mine, lora_name, cache_salt)
            parent = key

    def moved(self, event: Offloaded | Removed) -> None:
        """Blocks came to a tier behind the device, or left any."""
        medium = _MEDIUM[event.tier]
        if isinstance(event, Removed):
            self._ready.append(BlockRemoved(event.blocks, medium))
            if self._blocks is not None:
                self._forget(event.blocks, self._blocks)
            return
        assert self._blocks is not None
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
        """Send what was collected."""
        if self._ready:
            self._publisher.publish(self._ready)
            self._ready = []

    def _forget(self, keys: Sequence[int], blocks: dict[int, _Block]) -> None:
        for key in keys:
            block = blocks[key]
            block.places -= 1
            if not block.places:
                del blocks[key]

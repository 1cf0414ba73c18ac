"""TensorRT-LLM's KV events, and their translation into ours. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec
from attrs import define, field

from commutator.contract.block import BlockRemoved, BlocksCleared, BlockStored, KvEvent

_MEDIA = ("GPU", "CPU")


class Token(msgspec.Struct):
    """A token of a block; ``token_extra_id`` is not 0 when it stands for other content."""

    token_id: int
    token_extra_id: int = 0


class BlockData(msgspec.Struct):
    """One block of a `stored` event."""

    block_hash: int
    tokens: list[Token] = []
    cache_level: int = 0
    lora_id: int | None = None
    mm_keys: list[Any] | None = None


class LevelChange(msgspec.Struct):
    """Part of an `updated` event."""

    old_value: int
    new_value: int


class CacheEventData(msgspec.Struct):
    """The change; ``type`` decides which fields are set."""

    type: str
    parent_hash: int | None = None
    blocks: list[BlockData] = []
    block_hashes: list[int] = []
    block_hash: int | None = None
    cache_level: LevelChange | None = None


class CacheEvent(msgspec.Struct):
    """One entry of POST /kv_cache_events."""

    event_id: int
    data: CacheEventData
    window_size: int | None = None
    attention_dp_rank: int | None = None


@define(eq=False)
class EventTranslator:
    """Translates the events of one server about blocks of ``block_size`` tokens.

    Leaves out blocks that must not match other prompts of the same tokens (images, adapters), and
    blocks that follow a block that is left out or unknown. It follows the widest attention window
    of a model, and rank 0 of data-parallel attention, because requests over HTTP cannot choose a
    rank.
    """

    block_size: int
    gaps: int = 0
    """How often events were missing; each time all blocks are forgotten."""
    restarts: int = 0
    """How often the server's event numbers started again."""
    _next: int | None = None
    _window: int = 0
    _levels: dict[int, int] = field(factory=dict)
    """The cache level of each block that was published and not removed."""

    @property
    def blocks(self) -> int:
        """Number of blocks that were published and not removed."""
        return len(self._levels)

    def translate(self, events: Iterable[CacheEvent]) -> list[KvEvent]:
        """The events to publish for the next events of the server's queue."""
        return [translated for event in events for translated in self._translate(event)]

    def forget(self) -> list[KvEvent]:
        """Forget all blocks, as the server's are unknown; the events to publish for that."""
        self._levels.clear()
        self._next, self._window = None, 0
        return [BlocksCleared()]

    def _translate(self, event: CacheEvent) -> Iterator[KvEvent]:
        if event.attention_dp_rank:
            return
        if self._next is not None and event.event_id != self._next:
            self.restarts += event.event_id < self._next
            self.gaps += event.event_id > self._next
            yield from self.forget()
        self._next = event.event_id + 1
        window = event.window_size or 0
        if window > self._window:
            if self._levels:
                self._levels.clear()
                yield BlocksCleared()
            self._window = window
        if window < self._window:
            return
        data = event.data
        if data.type == "stored":
            yield from self._stored(data.parent_hash or None, data.blocks)
        elif data.type == "removed":
            yield from self._removed(data.block_hashes)
        elif data.type == "updated" and data.block_hash in self._levels and data.cache_level:
            yield from self._moved(data.block_hash, data.cache_level.new_value)

    def _stored(self, parent: int | None, blocks: Sequence[BlockData]) -> Iterator[KvEvent]:
        if parent is not None and parent not in self._levels:
            return
        usable: list[BlockData] = []
        for block in blocks:
            if not self._is_usable(block):
                break
            usable.append(block)
        for level, run in groupby(usable, key=lambda block: block.cache_level):
            chain = list(run)
            hashes = tuple(block.block_hash for block in chain)
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=tuple(token.token_id for block in chain for token in block.tokens),
                block_size=self.block_size,
                medium=_medium(level),
            )
            self._levels |= dict.fromkeys(hashes, level)
            parent = hashes[-1]

    def _is_usable(self, block: BlockData) -> bool:
        whole = len(block.tokens) == self.block_size
        plain = not any(token.token_extra_id for token in block.tokens)
        return whole and plain and block.lora_id is None and not block.mm_keys

    def _removed(self, hashes: Iterable[int]) -> Iterator[KvEvent]:
        gone = [(self._levels.pop(name), name) for name in hashes if name in self._levels]
        for level, run in groupby(gone, key=lambda pair: pair[0]):
            yield BlockRemoved(block_hashes=tuple(name for _, name in run), medium=_medium(level))

    def _moved(self, name: int | None, level: int) -> Iterator[KvEvent]:
        assert name is not None
        old = self._levels[name]
        if level != old:
            self._levels[name] = level
            # Subscribers know the block's tokens from its first event.
            yield BlockStored(
                block_hashes=(name,),
                parent_block_hash=None,
                token_ids=(),
                block_size=self.block_size,
                medium=_medium(level),
            )
            yield BlockRemoved(block_hashes=(name,), medium=_medium(old))


def _medium(level: int) -> str:
    return _MEDIA[level] if level < len(_MEDIA) else "DISK"

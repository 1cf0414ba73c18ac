"""From TensorRT-LLM's KV events to those that routing knows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from attrs import define, field

from commutator.kv import BlockRemoved, BlocksCleared, BlockStored, KvEvent
from commutator_trtllm.api import BlockData, CacheEvent

__all__ = ["EventTranslator"]

_MEDIA = ("GPU", "CPU")


@define(eq=False)
class EventTranslator:
    """Follows one server. Blocks of ``block_size`` tokens are told of, others are not.

    Left out is what other prompts of the same tokens must not be matched with (pictures, adapters),
    and whatever follows a block that is left out or unknown. Of models with several attention
    windows the widest is followed, and of data-parallel attention rank 0: requests over HTTP
    cannot choose a rank.
    """

    block_size: int
    gaps: int = 0
    """How often events were missing: all blocks are forgotten, as nobody tells what happened."""
    restarts: int = 0
    """How often the server's numbers began anew."""
    other_ranks: int = 0
    """Events of ranks that are not followed."""
    _next: int | None = None
    _window: int = 0
    _levels: dict[int, int] = field(factory=dict)
    """Where each block that was told of lies."""

    @property
    def blocks(self) -> int:
        """How many blocks were told of and are still there."""
        return len(self._levels)

    def translate(self, events: Iterable[CacheEvent]) -> list[KvEvent]:
        """What to publish for the next events of the server's queue."""
        return [told for event in events for told in self._translate(event)]

    def forget(self) -> list[KvEvent]:
        """What the server has is not known any longer; what to publish for that."""
        self._levels.clear()
        self._next, self._window = None, 0
        return [BlocksCleared()]

    def _translate(self, event: CacheEvent) -> Iterator[KvEvent]:
        if event.attention_dp_rank:
            self.other_ranks += 1
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
            yield BlockRemoved(tuple(name for _, name in run), _medium(level))

    def _moved(self, name: int | None, level: int) -> Iterator[KvEvent]:
        assert name is not None
        old = self._levels[name]
        if level != old:
            self._levels[name] = level
            # Its tokens are known to whoever was told of it.
            yield BlockStored((name,), None, (), self.block_size, medium=_medium(level))
            yield BlockRemoved((name,), _medium(old))


def _medium(level: int) -> str:
    return _MEDIA[level] if level < len(_MEDIA) else "DISK"

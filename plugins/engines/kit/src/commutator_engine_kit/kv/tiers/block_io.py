"""The interface that stores blocks in one tier and loads them. Guards implement it by wrapping.

All implementations run on the tier's own thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from commutator.contract.block import BlockDescriptor, BlockKey
from commutator.contract.tier import Slot, Span, StoredBlock
from commutator_engine_kit.kv.block_manager.actions import LoadResult

__all__ = ["BlockIo", "IoContext", "LoadBlock", "StoreBlock", "Unstored"]


@frozen(kw_only=True)
class StoreBlock:
    """A block to write into a reserved slot."""

    offer: BlockDescriptor
    slot: Slot
    local: Span
    """Where its bytes are. They do not change during the store."""

    @property
    def key(self) -> BlockKey:
        return self.offer.key

    def stored(self, size_bytes: int, checksum: int) -> StoredBlock:
        """The record to commit once the slot has ``size_bytes`` bytes."""
        offer = self.offer
        return StoredBlock(
            key=offer.key,
            slot=self.slot,
            size_bytes=size_bytes,
            checksum=checksum,
            parent=offer.parent,
            token_ids=offer.token_ids,
            adapter=offer.adapter,
            tenant=offer.facts.tenant,
        )


@frozen(kw_only=True)
class LoadBlock:
    """A committed, pinned block to read."""

    stored: StoredBlock
    local: Span
    """Where its bytes go. They are not read before the block is ``LOADED``."""


@frozen
class Unstored:
    """A block that was not written, with the reason."""

    reason: str


@define
class IoContext:
    """A job's deadline, and whether it was cancelled."""

    deadline_s: float
    """On ``time.monotonic``'s clock."""
    cancelled: Callable[[], bool] = field(default=lambda: False)

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether to stop: the deadline has passed, or the job was cancelled."""
        return self.cancelled() or self.remaining_s == 0


class BlockIo(ABC):
    """Stores and loads blocks. Each block has its own result, independent of the others."""

    @abstractmethod
    def store(
        self, blocks: Sequence[StoreBlock], context: IoContext
    ) -> list[StoredBlock | Unstored]:
        """Write each block. A ``StoredBlock`` is ready to be committed."""

    @abstractmethod
    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        """Read each block and verify it."""

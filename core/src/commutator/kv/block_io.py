"""Stores blocks in one tier and loads them from it. Whatever wraps it has the same two methods.

All of it runs on the tier's own thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from commutator.kv.keys import BlockKey
from commutator.kv.load_result import LoadResult
from commutator.kv.offer import Offer
from commutator.kv.tier import Slot, Stored
from commutator.transfer.spans import Span

__all__ = ["BlockIo", "IoContext", "LoadBlock", "StoreBlock", "Unstored"]


@frozen(kw_only=True)
class StoreBlock:
    """A block to write into a reserved slot."""

    offer: Offer
    slot: Slot
    local: Span
    """Where its bytes are; nobody changes them meanwhile."""

    @property
    def key(self) -> BlockKey:
        return self.offer.key

    def stored(self, size_bytes: int, checksum: int) -> Stored:
        """What to commit once so many bytes are in the slot."""
        offer = self.offer
        return Stored(
            key=offer.key,
            slot=self.slot,
            size_bytes=size_bytes,
            checksum=checksum,
            parent=offer.parent,
            token_ids=offer.token_ids,
            lora_name=offer.lora_name,
            tenant=offer.facts.tenant,
        )


@frozen(kw_only=True)
class LoadBlock:
    """A committed, pinned block to read."""

    stored: Stored
    local: Span
    """Where its bytes go; nobody reads there before the block is ``LOADED``."""


@frozen
class Unstored:
    """A block that was not written, and why."""

    reason: str


@define
class IoContext:
    """How long a job may take, and whether anyone still wants it."""

    deadline_s: float
    """On ``time.monotonic``'s clock."""
    cancelled: Callable[[], bool] = field(default=lambda: False)

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether to stop: it is too late, or nobody wants it."""
        return self.cancelled() or self.remaining_s == 0


class BlockIo(ABC):
    """Every result stands for its own block, whatever happened to the others."""

    @abstractmethod
    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[Stored | Unstored]:
        """Write each block; what comes back as ``Stored`` is ready to be committed."""

    @abstractmethod
    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        """Read each block and verify it."""

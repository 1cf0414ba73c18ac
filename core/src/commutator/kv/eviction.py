"""The contract of an eviction policy: which block of a tier goes when room is needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from commutator.kv.keys import BlockKey
from commutator.kv.offer import BlockFacts

__all__ = ["EvictionPolicy"]


class EvictionPolicy(ABC):
    """Orders the blocks of one tier. Reads no clock, does no I/O, and costs O(1) or O(log n).

    A policy only orders: retention (priority, TTL, pinning), quotas and what is in use are the
    manager's business. Blocks that must stay are not in the policy, or not ``evictable``. While it
    holds no block it can be deep-copied: each priority of a tier gets a policy of its own.
    """

    @abstractmethod
    def added(
        self, key: BlockKey, parent: BlockKey | None, facts: BlockFacts, now_s: float
    ) -> None:
        """A block was stored. It is not known yet, but may have been earlier.

        Of the blocks of a chain the last is added first, so that plain recency keeps beginnings.
        """

    @abstractmethod
    def touched(self, key: BlockKey, now_s: float) -> None:
        """A block was used again. Unknown keys are ignored."""

    @abstractmethod
    def removed(self, key: BlockKey, *, evicted: bool) -> None:
        """A block is gone: ``evicted`` to make room, or lost or deleted. Unknown keys are ignored.

        What a policy remembers of blocks that are gone must be bounded by its capacity.
        """

    @abstractmethod
    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now_s: float
    ) -> list[BlockKey]:
        """Up to ``count`` different known blocks that are ``evictable``, the first to go first.

        Fewer only when there are no more. They stay known until ``removed``.
        """

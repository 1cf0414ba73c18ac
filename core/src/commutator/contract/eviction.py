"""Eviction policies: which block of a tier is removed when room is needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from attrs import frozen

from commutator.contract.block import BlockKey, RetentionHints
from commutator.contract.settings import setting

__all__ = ["EvictionConfig", "EvictionPolicy"]


class EvictionPolicy(ABC):
    """Orders the blocks of one tier. Reads no clock, does no I/O, and costs O(1) or O(log n).

    The block manager applies retention (priority, TTL, pinning) and quotas, and protects blocks in
    use: blocks that must stay are not in the policy, or not ``evictable``. There is one policy for
    each priority of a tier.
    """

    @abstractmethod
    def added(
        self, key: BlockKey, parent: BlockKey | None, facts: RetentionHints, now_s: float
    ) -> None:
        """A block was stored. It is unknown now, but may have been known earlier.

        The last block of a chain is added first, so that LRU evicts the ends of chains first.
        """

    def touched(self, key: BlockKey, now_s: float) -> None:
        """A block was used again. Ignores unknown keys; here, all."""

    @abstractmethod
    def removed(self, key: BlockKey, *, evicted: bool) -> None:
        """A block was removed: ``evicted`` to make room, or lost or deleted. Ignores unknown keys.

        A policy may remember removed blocks, at most as many as its capacity.
        """

    @abstractmethod
    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now_s: float
    ) -> list[BlockKey]:
        """Up to ``count`` different known blocks that are ``evictable``, in the order of eviction.

        Fewer only when there are no more. They stay known until ``removed``.
        """


@frozen(kw_only=True)
class EvictionConfig:
    """Options of every eviction policy; each policy plugin adds its own."""

    kind: str = setting("The eviction policy plugin.")

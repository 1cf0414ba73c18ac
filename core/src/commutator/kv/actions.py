"""What the manager asks for. Actions of one answer are to be carried out in their order."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

from attrs import frozen

from commutator.kv.keys import BlockKey
from commutator.kv.load_result import LoadResult
from commutator.kv.offer import Offer

__all__ = [
    "DEVICE",
    "TO_MAKE_ROOM",
    "Action",
    "Announce",
    "FreeBlocks",
    "ReleaseSource",
    "StoreBlocks",
    "Urgency",
]

DEVICE = -1
"""The engine's own arena as a source; tiers are numbered from 0, fastest first."""


TO_MAKE_ROOM = frozenset({"evicted", "moved down", "over capacity"})
"""Reasons for which sound blocks go: where others share them, they stay for those."""


class Urgency(IntEnum):
    """Lower goes first."""

    MAKE_ROOM = 0
    """Somebody waits for the room that the source takes up."""
    BACKGROUND = 1
    """Nobody waits."""
    PREFETCH = 2
    """Nobody may ever ask for it."""


@frozen(kw_only=True)
class StoreBlocks:
    """Copy blocks from the device or a tier to another tier; answer with ``finish_store``.

    There is room in ``target`` for all of them. The source keeps them until the answer.
    """

    move_id: int
    source: int
    target: int
    offers: tuple[Offer, ...]
    priority: Urgency

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """The blocks' keys, in the order of ``offers``."""
        return tuple(offer.key for offer in self.offers)


@frozen(kw_only=True)
class FreeBlocks:
    """Forget committed blocks of a tier: no load or move reads them."""

    tier: int
    keys: tuple[BlockKey, ...]
    reason: str
    """Such as "evicted", "corrupt", "missing"; the words of the counters."""

    @property
    def makes_room(self) -> bool:
        """Whether the blocks are sound, and only their slots are needed."""
        return self.reason in TO_MAKE_ROOM or self.reason == LoadResult.MISSING.value


@frozen(kw_only=True)
class ReleaseSource:
    """The device blocks of these offers may be reused; a key stands once for each offer of it."""

    keys: tuple[BlockKey, ...]


@frozen(kw_only=True)
class Announce:
    """Tell routers that blocks can be reused from a tier, or no longer."""

    what: Literal["stored", "removed"]
    tier: int
    medium: str
    blocks: tuple[Offer, ...]
    """With parent, tokens, adapter and tenant; tokens may be empty after a restart."""


Action = StoreBlocks | FreeBlocks | ReleaseSource | Announce

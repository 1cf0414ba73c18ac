"""What an engine's look-ups, loads and stores share: its tiers, and what decides about them."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from commutator.errors import TierError
from commutator_engine_kit.kv.arena import Arena
from commutator_engine_kit.kv.block_manager.manager import BlockManager
from commutator_engine_kit.kv.event_queue import EventQueue
from commutator_engine_kit.kv.tiers.thread import TierThread

__all__ = ["TierStack"]


@define(eq=False)
class TierStack:
    """An engine's tiers, fastest first. The block manager is called with ``queue`` held."""

    arena: Arena
    """The engine's KV memory."""
    queue: EventQueue
    threads: Sequence[TierThread] = ()
    opened: BlockManager | None = None
    """None until the first attempt to open every tier has ended."""
    closed: bool = False

    @property
    def manager(self) -> BlockManager:
        """Decides which blocks are in which tier."""
        assert self.opened is not None, "start() comes first"
        return self.opened

    def must_be_open(self) -> None:
        """Raise TierError once the tiers are closed."""
        if self.closed:
            raise TierError("the tiers are closed")

"""Moves KV bytes with NIXL. No other package calls NIXL."""

from __future__ import annotations

from commutator_engine_kit.nixl.agent import TransferAgent, TransferPath
from commutator_engine_kit.nixl.library import load_nixl
from commutator_engine_kit.nixl.moves import BlockMove, MoveLimits, move_blocks

__all__ = [
    "BlockMove",
    "MoveLimits",
    "TransferAgent",
    "TransferPath",
    "load_nixl",
    "move_blocks",
]

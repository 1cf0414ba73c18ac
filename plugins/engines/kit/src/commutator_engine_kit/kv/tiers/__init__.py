"""Storage tiers at work: each tier has its own thread, which moves the tier's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commutator.faces import face

if TYPE_CHECKING:
    from commutator_engine_kit.kv.tiers.block_io import BlockIo, LoadBlock, StoreBlock, Unstored
    from commutator_engine_kit.kv.tiers.codecs import HEADER_BYTES, FrameError, FrameHeader
    from commutator_engine_kit.kv.tiers.mover import IoContext

__all__ = [
    "HEADER_BYTES",
    "BlockIo",
    "FrameError",
    "FrameHeader",
    "IoContext",
    "LoadBlock",
    "StoreBlock",
    "Unstored",
]

__getattr__ = face(__name__, __file__)

"""Stores framed blocks in a tier and loads them, by a NIXL agent of its own."""

from __future__ import annotations

import ctypes
import mmap
import random
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from commutator.contract.block import BlockKey
from commutator.contract.tier import Direction, Memory, SlotGeometry, Span, StorageTier, StoredBlock
from commutator.errors import TransferError, TransferTimeoutError
from commutator_engine_kit.kv.arena import BlockArena, bytes_at, checksum
from commutator_engine_kit.kv.tiers.codecs import HEADER_BYTES, FrameError, FrameHeader
from commutator_engine_kit.nixl.agent import TransferAgent, TransferPath
from commutator_engine_kit.nixl.moves import BlockMove, MoveLimits, move_blocks

__all__ = ["TierMover", "block_of", "geometry_of", "random_keys"]

_pinned: list[mmap.mmap] = []
"""Memory that NIXL may still touch after its agent was closed."""

Outcome = bytes | str
"""A loaded payload, or why there is none: "missing", "failed" or "corrupt"."""


def random_keys(count: int, seed: int = 0) -> list[BlockKey]:
    return [random.Random(f"{seed}/{number}").randbytes(32) for number in range(count)]


def block_of(key: BlockKey, size_bytes: int) -> bytes:
    """The bytes that belong to a key."""
    return random.Random(key).randbytes(size_bytes)


def geometry_of(block_bytes: int, identity: str = "ab" * 32) -> SlotGeometry:
    return SlotGeometry(
        block_bytes=block_bytes, slot_bytes=block_bytes + HEADER_BYTES, identity=identity
    )


class TierMover:
    """An open tier with memory for ``count`` blocks. A context manager."""

    def __init__(self, tier: StorageTier, block_bytes: int = 1000, count: int = 16) -> None:
        self.tier, self.timeout_s = tier, 20.0
        self._block_bytes = block_bytes
        slot_bytes = block_bytes + HEADER_BYTES
        self._memory = mmap.mmap(-1, slot_bytes * count)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.arena = BlockArena(
            memory=Memory.DRAM, address=address, block_bytes=slot_bytes, count=count
        )
        self.agent = TransferAgent(
            f"test-{uuid.uuid4().hex}", {tier.backend: tier.backend_parameters}
        )
        self.agent.register([self.arena.region], tier.backend)

    def __enter__(self) -> Self:
        self.tier.open(geometry_of(self._block_bytes))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.tier.close()
        try:
            self.agent.close()
        except TransferTimeoutError:
            _pinned.append(self._memory)
            raise

    def store(self, keys: Sequence[BlockKey]) -> list[TransferError | None]:
        """Reserve, write, and commit what was written. Every key must be new."""
        slots = [slot for slot in self.tier.reserve(keys) if slot is not None]
        assert len(slots) == len(keys)
        self.fill(keys)
        results = self.move(Direction.WRITE, slots, [self.arena.block_bytes] * len(slots))
        written = [result is None for result in results]
        self.tier.commit(
            StoredBlock(key=key, slot=slot, size_bytes=self.arena.block_bytes, checksum=0)
            for key, slot, done in zip(keys, slots, written, strict=True)
            if done
        )
        self.tier.release(slot for slot, done in zip(slots, written, strict=True) if not done)
        return results

    def load(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """What ``lookup`` knows of, read and verified. The memory holds something else before."""
        found = self.tier.lookup(keys)
        blocks = [block for block in found if block is not None]
        for number in range(len(blocks)):
            bytes_at(self.arena.span(number))[:] = b"\xee" * self.arena.block_bytes
        for block in blocks:
            self.tier.pin(block.slot)
        moved = self.move(
            Direction.READ, [block.slot for block in blocks], [block.size_bytes for block in blocks]
        )
        for block in blocks:
            self.tier.unpin(block.slot)
        outcomes = {
            block.key: "failed" if moved[number] is not None else self._read(number, block)
            for number, block in enumerate(blocks)
        }
        return [outcomes.get(key, "missing") for key in keys]

    def fill(self, keys: Sequence[BlockKey]) -> None:
        """Write each key's frame to memory."""
        for number, key in enumerate(keys):
            payload = block_of(key, self._block_bytes)
            header = FrameHeader(
                tag=key,
                block_bytes=len(payload),
                payload_bytes=len(payload),
                checksum=checksum(payload),
            )
            bytes_at(self.arena.span(number))[:] = header.pack() + payload

    def move(
        self, direction: Direction, slots: Sequence[int], sizes: Sequence[int]
    ) -> list[TransferError | None]:
        """Between memory, from its beginning, and slots."""
        moves = []
        for number, (slot, size_bytes) in enumerate(zip(slots, sizes, strict=True)):
            span, region = self.tier.place(slot, size_bytes)
            local = self.arena.span(number)
            moves.append(BlockMove(Span(local.address, size_bytes), span, region))
        return move_blocks(
            self.agent,
            TransferPath(direction, Memory.DRAM, self.tier.memory, self.tier.backend),
            moves,
            MoveLimits(timeout_s=self.timeout_s),
        )

    def _read(self, number: int, block: StoredBlock) -> Outcome:
        frame = bytes_at(self.arena.span(number))[: block.size_bytes]
        try:
            return bytes(FrameHeader.parse(frame, block.key).payload(frame))
        except FrameError:
            return "corrupt"

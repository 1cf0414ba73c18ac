"""Stores blocks in a tier and reads them back with NIXL, one at a time: for tests of tiers."""

from __future__ import annotations

import gc
import mmap
import uuid
from ctypes import addressof, c_char
from typing import Self

from commutator import BlockKey, Memory, Region, Slot, SlotGeometry, Span, StorageTier, StoredBlock
from commutator.contract.tier import Direction
from commutator_engine_kit.kv import bytes_at, checksum
from commutator_engine_kit.kv.tiers import HEADER_BYTES, FrameError, FrameHeader
from commutator_engine_kit.nixl import TransferAgent, TransferPath

_PAGE_BYTES = 4096

_TIMEOUT_S = 30.0


class TierAgents:
    """One NIXL agent for each backend and its parameters, reused because agents start slowly."""

    def __init__(self) -> None:
        self._agents: dict[tuple[str, tuple[tuple[str, str], ...]], TransferAgent] = {}

    def of(self, tier: StorageTier) -> TransferAgent:
        parameters = tier.backend_parameters
        kind = tier.backend, tuple(sorted(parameters.items()))
        if kind not in self._agents:
            name = f"tier-user-{uuid.uuid4().hex}"
            self._agents[kind] = TransferAgent(name, {tier.backend: parameters})
        return self._agents[kind]

    def close(self) -> None:
        while self._agents:
            self._agents.popitem()[1].close()


class TierUser:
    """Opens a tier and moves its bytes, one block at a time."""

    def __init__(
        self, tier: StorageTier, geometry: SlotGeometry, agents: TierAgents | None = None
    ) -> None:
        """``agents`` are reused; without them it makes its own. Raises TierError like ``open``."""
        self.tier = tier
        self.geometry = geometry
        self.recovered = list(tier.open(geometry))
        pages = -(-geometry.slot_bytes // _PAGE_BYTES)
        self._memory = mmap.mmap(-1, pages * _PAGE_BYTES)
        address = addressof(c_char.from_buffer(self._memory))
        self._scratch = Region(memory=Memory.DRAM, span=Span(address, len(self._memory)))
        self._agents = TierAgents() if agents is None else agents
        self._owns_agents = agents is None
        self._agent = self._agents.of(tier)
        self._regions = [self._scratch, *tier.regions()]
        for region in self._regions:
            self._agent.register([region], tier.backend)

    def put(self, key: BlockKey, block: bytes, parent: BlockKey | None = None) -> bool:
        """Store a block; False when the tier has no slot for it."""
        (slot,) = self.tier.reserve([key])
        if slot is None:
            return False
        self.tier.commit([self.write(slot, key, block, parent)])
        return True

    def get(self, key: BlockKey) -> bytes | None:
        """The block, verified; None when the tier does not have it."""
        (stored,) = self.find(key)
        if stored is None:
            return None
        self.tier.pin(stored.slot)
        try:
            return self.read(stored)
        finally:
            self.tier.unpin(stored.slot)

    def find(self, *keys: BlockKey) -> list[StoredBlock | None]:
        """The stored blocks of ``keys``; None for each that the tier does not have."""
        if not self.tier.shared:
            return self.tier.lookup(keys)
        # One by one, because the keys are no chain.
        return [self.tier.probe([key])[0] for key in keys]

    def write(
        self, slot: Slot, key: BlockKey, block: bytes, parent: BlockKey | None = None
    ) -> StoredBlock:
        """Write a block into a reserved slot; returns the value to commit."""
        data, total = block, checksum(block)
        if self.tier.framed:
            header = FrameHeader(
                tag=key, block_bytes=len(block), payload_bytes=len(block), checksum=total
            )
            data, total = header.pack() + block, 0
        self._memory[: len(data)] = data
        self._move(Direction.WRITE, slot, len(data))
        return StoredBlock(
            key=key,
            slot=slot,
            size_bytes=len(data),
            checksum=total,
            parent=parent,
            token_ids=tuple(key[: self.geometry.block_tokens]),
        )

    def read(self, stored: StoredBlock) -> bytes:
        """The bytes of a committed, pinned block. Raises ValueError when they are not intact."""
        self._memory[:] = b"\xaa" * len(self._memory)  # so that bytes that are not read are noticed
        self._move(Direction.READ, stored.slot, stored.size_bytes)
        data = bytes(bytes_at(self._scratch.span)[: stored.size_bytes])
        if self.tier.framed:
            header = FrameHeader.parse(memoryview(data), stored.key)
            return bytes(header.payload(memoryview(data)))
        if checksum(data) != stored.checksum:
            raise FrameError(f"slot {stored.slot}: the bytes differ from the committed ones")
        return data

    def close(self) -> None:
        """End as an orderly process does: the tier is closed."""
        self._release_agents()
        self.tier.close()

    def crash(self) -> None:
        """End as a killed process does: the tier is not closed."""
        self._release_agents()
        del self.tier
        gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _release_agents(self) -> None:
        for region in self._regions:
            self._agent.deregister([region], self.tier.backend)
        if self._owns_agents:
            self._agents.close()

    def _move(self, direction: Direction, slot: Slot, size_bytes: int) -> None:
        step = self.tier.alignment_bytes
        remote, region = self.tier.place(slot, -(-size_bytes // step) * step)
        local = Span(self._scratch.span.address, remote.size_bytes)
        path = TransferPath(direction, Memory.DRAM, self.tier.memory, self.tier.backend)
        regions = [region] if region is not None else []
        self._agent.start(path, [local], [remote], regions).wait(_TIMEOUT_S)


def slot_geometry(
    tier: StorageTier, block_bytes: int, block_tokens: int, identity: str
) -> SlotGeometry:
    """Slots for uncompressed blocks, with room for a header if the tier needs one."""
    return SlotGeometry(
        block_bytes=block_bytes,
        slot_bytes=block_bytes + (HEADER_BYTES if tier.framed else 0),
        block_tokens=block_tokens,
        identity=identity,
    )

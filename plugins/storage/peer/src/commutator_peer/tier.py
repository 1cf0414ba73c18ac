"""The `peer` tier: asks other workers for a chain of blocks, and reads the blocks they lend."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from attrs import define

from commutator import (
    BlockKey,
    Memory,
    Region,
    Slot,
    SlotGeometry,
    Span,
    StorageTier,
    StoredBlock,
    TierStatistics,
)
from commutator.contract.tier import ExportOptions, RemoteAgent
from commutator.errors import TierError
from commutator_engine_kit.kv.transfer import (
    EventLoopThread,
    LentBlocks,
    LookupRequest,
    ReleaseRequest,
    Sources,
)
from commutator_peer.choice import PeerChoice
from commutator_peer.config import PeerTierConfig

_CAPACITY = 1 << 16
"""The number of peers' blocks that the block manager remembers."""

_LONGEST_LEASE_S = 600.0
"""A longer lease is used as one of this length: what is remembered must end some day."""

_ADDRESSES = 1 << 64
_MOST_METADATA_BYTES = 1 << 22

_SHUNNED_S = 60.0
"""An evicted block is not asked for during this time: its lender's copy may be damaged."""


@define
class _Borrowed:
    """A block in a peer's memory."""

    stored: StoredBlock
    span: Span
    agent: RemoteAgent
    lender: str
    """The address of the peer's exporter."""
    lease_id: str
    index: int
    """The block's number at its lender."""
    ends_s: float
    """No read begins after this time."""
    pins: int = 0


class PeerTier(StorageTier):
    """Other workers' host memory, read-only: ``reserve`` never returns a slot.

    ``probe`` asks at most ``max_asked`` peers (see ``PeerChoice``), waits for at most
    ``ask_timeout_s``, and never raises. After that, ``lookup`` knows each lent block until it was
    read once or half of its lease is over. A block must be pinned to be read, and the last
    ``unpin`` releases it. A slot's number is never reused, so that a late reader finds nothing
    rather than another block.
    """

    medium = "REMOTE"
    memory = Memory.DRAM
    backend = "UCX"
    shared = True
    writable = False
    asks_peers = True

    def __init__(self, config: PeerTierConfig) -> None:
        self._config = config
        self._find: Callable[[], Sequence[str]] = tuple
        self._geometry: SlotGeometry | None = None
        self._loop: EventLoopThread | None = None
        self._sources = Sources()
        self._next: Slot = 0
        self._borrowed: dict[Slot, _Borrowed] = {}
        self._slots: dict[BlockKey, Slot] = {}
        self._shunned: dict[BlockKey, float] = {}
        self._choice = PeerChoice(config.max_asked)

    def use_peers(self, find: Callable[[], Sequence[str]]) -> None:
        self._find = find

    @property
    def export_options(self) -> ExportOptions | None:
        return self._config.export_options()

    def open(self, geometry: SlotGeometry) -> Sequence[StoredBlock]:
        if self._loop is not None:
            raise TierError("peer: the tier is open already; close it first")
        self._geometry, self._loop = geometry, EventLoopThread("kv-peers")
        self._sources = Sources(max_silences=self._config.max_silences)
        return ()

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is None:
            return
        self._release(loop, list(self._borrowed.values()))
        loop.run(self._sources.close())
        loop.close()
        self._borrowed.clear()
        self._slots.clear()
        self._shunned.clear()

    def regions(self) -> Sequence[Region]:
        return ()

    def reserve(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        return [None] * len(keys)

    def commit(self, blocks: Iterable[StoredBlock]) -> None:
        for block in blocks:
            raise ValueError(f"slot {block.slot} is not reserved: the peer tier is read-only")

    def release(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            raise ValueError(f"slot {slot} is not reserved: the peer tier is read-only")

    def lookup(self, keys: Sequence[BlockKey]) -> list[StoredBlock | None]:
        self._opened()
        now_s = time.monotonic()
        return [self._lookup(key, now_s) for key in keys]

    def probe(self, keys: Sequence[BlockKey]) -> list[StoredBlock | None]:
        geometry, loop = self._opened()
        now_s = time.monotonic()
        self._expire(now_s)
        unknown = [key for key in keys if self._lookup(key, now_s) is None]
        if asked := tuple(self._before_shunned(dict.fromkeys(unknown), now_s)):
            request = LookupRequest(
                id=uuid.uuid4().hex,
                identity=geometry.identity,
                slot_bytes=geometry.slot_bytes,
                keys=asked,
            )
            peers = dict.fromkeys((*self._config.addresses, *self._find()))
            chosen = self._choice.choose(peers, keys[0])
            timeout_s = self._config.ask_timeout_s
            looked_up = self._sources.look_up(chosen, request, timeout_s, keep=peers)
            for lender, lent in loop.run(looked_up):
                if lent.blocks:
                    self._choice.lent(lender, keys[0])
                self._take(request, lender, lent, now_s + min(lent.lease_s, _LONGEST_LEASE_S) / 2)
        return self.lookup(keys)

    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        span = self._entry(slot).span
        return Span(span.address, size_bytes, span.device), None

    def peer(self, slot: Slot) -> RemoteAgent | None:
        return self._entry(slot).agent

    def pin(self, slot: Slot) -> None:
        self._entry(slot).pins += 1

    def unpin(self, slot: Slot) -> None:
        _, loop = self._opened()
        entry = self._entry(slot)
        if not entry.pins:
            raise ValueError(f"slot {slot} is not pinned")
        entry.pins -= 1
        if not entry.pins:
            self._release(loop, [self._drop(slot)])

    def evict(self, keys: Iterable[BlockKey]) -> None:
        keys, now_s = list(keys), time.monotonic()
        for key in keys:
            if self._lookup(key, now_s) is not None:
                self._shunned[key] = now_s + _SHUNNED_S
        self.make_room(keys)

    def make_room(self, keys: Iterable[BlockKey]) -> None:
        """Forget blocks; one that is being read is released after the read."""
        _, loop = self._opened()
        slots = [slot for key in keys if (slot := self._slots.pop(key, None)) is not None]
        self._release(loop, [self._drop(slot) for slot in slots if not self._borrowed[slot].pins])

    def committed(self) -> Iterable[StoredBlock]:
        now_s = time.monotonic()
        return [stored for key in self._slots if (stored := self._lookup(key, now_s)) is not None]

    def statistics(self) -> TierStatistics:
        self._opened()
        return TierStatistics(
            capacity=_CAPACITY,
            committed=len(list(self.committed())),
            reserved=0,
            pinned=sum(1 for entry in self._borrowed.values() if entry.pins),
        )

    def _opened(self) -> tuple[SlotGeometry, EventLoopThread]:
        if self._geometry is None or self._loop is None:
            raise TierError("peer: the tier is not open; call open() first")
        return self._geometry, self._loop

    def _before_shunned(self, keys: Iterable[BlockKey], now_s: float) -> Iterator[BlockKey]:
        """The chain up to the first block that must not be asked for."""
        self._shunned = {key: end_s for key, end_s in self._shunned.items() if end_s > now_s}
        for key in keys:
            if key in self._shunned:
                return
            yield key

    def _take(self, request: LookupRequest, lender: str, lent: LentBlocks, ends_s: float) -> None:
        """Remember blocks that fit and that no other peer has lent; release the others at once."""
        geometry, loop = self._opened()
        now_s = time.monotonic()
        spare: list[_Borrowed] = []
        for key, block in zip(request.keys, lent.blocks, strict=False):
            span = block.span or Span(0, 0)
            stored = StoredBlock(
                key=key, slot=self._next, size_bytes=span.size_bytes, checksum=block.checksum
            )
            entry = _Borrowed(stored, span, lent.agent, lender, request.id, block.index, ends_s)
            fits = (
                block.key == key
                and 0 < span.size_bytes <= geometry.slot_bytes
                and 0 <= span.address <= _ADDRESSES - span.size_bytes
                and span.device >= 0
                and len(lent.agent.metadata) <= _MOST_METADATA_BYTES
            )
            full = len(self._borrowed) >= _CAPACITY
            if not fits or full or self._lookup(key, now_s) is not None:
                spare.append(entry)
                continue
            self._next += 1
            self._borrowed[stored.slot] = entry
            self._slots[key] = stored.slot
        self._release(loop, spare)

    def _lookup(self, key: BlockKey, now_s: float) -> StoredBlock | None:
        slot = self._slots.get(key)
        if slot is None:
            return None
        entry = self._borrowed[slot]
        return entry.stored if now_s < entry.ends_s else None

    def _expire(self, now_s: float) -> None:
        over = [s for s, e in self._borrowed.items() if now_s >= e.ends_s and not e.pins]
        for slot in over:
            self._drop(slot)

    def _entry(self, slot: Slot) -> _Borrowed:
        entry = self._borrowed.get(slot)
        if entry is None:
            raise ValueError(f"slot {slot} is free")
        return entry

    def _drop(self, slot: Slot) -> _Borrowed:
        entry = self._borrowed.pop(slot)
        if self._slots.get(entry.stored.key) == slot:
            del self._slots[entry.stored.key]
        return entry

    def _release(self, loop: EventLoopThread, entries: Sequence[_Borrowed]) -> None:
        leases: dict[tuple[str, str], list[int]] = defaultdict(list)
        for entry in entries:
            leases[entry.lender, entry.lease_id].append(entry.index)
        sources = self._sources

        def release() -> None:
            for (lender, lease_id), indices in leases.items():
                sources.release(lender, ReleaseRequest(lease_id, tuple(indices)))

        if leases:
            loop.soon(release)

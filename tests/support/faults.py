"""Wraps an engine client, a storage tier or its I/O so that it fails at random, by seed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from commutator import (
    BlockKey,
    EngineClient,
    EngineInfo,
    GenerateRequest,
    Memory,
    Slot,
    SlotGeometry,
    StorageTier,
    StoredBlock,
    TokenDelta,
    TokenStream,
)
from commutator.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    TierError,
)
from commutator_engine_kit.kv import LoadResult, bytes_at
from commutator_engine_kit.kv.tiers import (
    BlockIo,
    IoContext,
    LoadBlock,
    StoreBlock,
    Unstored,
)

__all__ = [
    "Faults",
    "FaultyClient",
    "FaultyIo",
    "FaultyTier",
    "IoFaults",
    "TierFaults",
    "damage",
    "rewrite",
]

_POLL_S = 0.005


def _unchanged(name: str) -> Any:
    """An attribute or method of the wrapped value."""
    return property(lambda self: getattr(self._inner, name))


@frozen
class Faults:
    """Chances from 0 to 1, drawn for every call or delta."""

    refuse_start: float = 0.0
    overloaded: float = 0.0
    lose_connection: float = 0.0
    """Before each delta: the stream ends with EngineUnavailableError."""
    fail: float = 0.0
    """Before each delta: the engine fails this request."""
    end_early: float = 0.0
    """Before each delta: the stream ends without a finish reason."""
    delay: float = 0.0
    delay_s: float = 0.05


class FaultyClient(EngineClient):
    """``inner`` with faults. Calls and deltas that do not fail pass unchanged."""

    def __init__(self, inner: EngineClient, faults: Faults, seed: int) -> None:
        self._inner = inner
        self._faults = faults
        self._rng = random.Random(seed)
        self.injected: list[str] = []
        """The names of the faults that happened, in order."""

    def _hit(self, name: str) -> bool:
        chance: float = getattr(self._faults, name)
        hit = self._rng.random() < chance
        if hit:
            self.injected.append(name)
        return hit

    async def start(self) -> EngineInfo:
        if self._hit("refuse_start"):
            raise EngineUnavailableError("injected: connection refused")
        return await self._inner.start()

    def generate(self, request: GenerateRequest) -> TokenStream:
        return _FaultyStream(self._inner.generate(request), self)

    forward = _unchanged("forward")
    load = _unchanged("load")
    drain = _unchanged("drain")
    close = _unchanged("close")

    async def maybe_fail(self) -> None:
        """Draw every fault of a stream once. Raises what the fault raises."""
        if self._hit("delay"):
            await asyncio.sleep(self._faults.delay_s)
        if self._hit("overloaded"):
            raise EngineOverloadedError("injected: full")
        if self._hit("lose_connection"):
            raise EngineUnavailableError("injected: connection lost")
        if self._hit("fail"):
            raise EngineError("injected: engine failure")
        if self._hit("end_early"):
            raise StopAsyncIteration


class _FaultyStream:
    def __init__(self, inner: TokenStream, client: FaultyClient) -> None:
        self._inner = inner
        self._client = client
        self._over = False

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._over:
            raise StopAsyncIteration
        try:
            await self._client.maybe_fail()
        except Exception:
            self._over = True
            await self._inner.aclose()
            raise
        return await self._inner.__anext__()

    async def aclose(self) -> None:
        self._over = True
        await self._inner.aclose()


@frozen(kw_only=True)
class IoFaults:
    """Chances from 0 to 1, drawn for every job."""

    fail: float = 0.0
    """No block is moved."""
    short: float = 0.0
    """Only the first blocks are moved."""
    slow: float = 0.0
    hang: float = 0.0
    """Nothing happens until the job's deadline or its cancellation."""
    slow_s: float = 0.02


class FaultyIo(BlockIo):
    """The I/O of a tier with faults; install it with ``TierSetup.wrap_io``."""

    def __init__(self, inner: BlockIo, faults: IoFaults, rng: random.Random) -> None:
        self._inner = inner
        self.faults = faults
        self._rng = rng

    def store(
        self, blocks: Sequence[StoreBlock], context: IoContext
    ) -> list[StoredBlock | Unstored]:
        through = self._through(len(blocks), context)
        results = self._inner.store(blocks[:through], context) if through else []
        return results + [Unstored("injected")] * (len(blocks) - through)

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        through = self._through(len(blocks), context)
        results = self._inner.load(blocks[:through], context) if through else []
        return results + [LoadResult.FAILED] * (len(blocks) - through)

    def _through(self, blocks: int, context: IoContext) -> int:
        faults, rng = self.faults, self._rng
        if rng.random() < faults.hang:
            while not context.over:
                time.sleep(_POLL_S)
            return 0
        if rng.random() < faults.slow:
            time.sleep(min(faults.slow_s, context.remaining_s))
        if rng.random() < faults.fail:
            return 0
        return rng.randint(0, blocks) if rng.random() < faults.short else blocks


@frozen(kw_only=True)
class TierFaults:
    """Chances from 0 to 1, drawn for every call, or for every block."""

    open: float = 0.0
    no_slot: float = 0.0
    """For each block: there is no free slot."""
    commit: float = 0.0
    evict: float = 0.0
    probe: float = 0.0
    corrupt: float = 0.0
    """For each committed block: one of its bytes on the medium changes."""
    cut: float = 0.0
    """For each committed block: its last bytes never reach the medium."""


class FaultyTier(StorageTier):
    """``inner`` with faults; only tiers in host memory or in files can be corrupted."""

    medium = _unchanged("medium")
    memory = _unchanged("memory")
    backend = _unchanged("backend")
    framed = _unchanged("framed")
    shared = _unchanged("shared")
    writable = _unchanged("writable")
    asks_peers = _unchanged("asks_peers")
    alignment_bytes = _unchanged("alignment_bytes")
    use_peers = _unchanged("use_peers")
    export_options = _unchanged("export_options")
    backend_parameters = _unchanged("backend_parameters")
    regions = _unchanged("regions")
    place = _unchanged("place")
    lookup = _unchanged("lookup")
    peer = _unchanged("peer")
    pin = _unchanged("pin")
    unpin = _unchanged("unpin")
    release = _unchanged("release")
    committed = _unchanged("committed")
    statistics = _unchanged("statistics")
    close = _unchanged("close")

    def __init__(self, inner: StorageTier, faults: TierFaults, rng: random.Random) -> None:
        self._inner = inner
        self.faults = faults
        self._rng = rng
        self.damaged: set[BlockKey] = set()
        """Stored blocks whose bytes were damaged."""

    def _hit(self, chance: float) -> bool:
        return self._rng.random() < chance

    def _maybe_fail(self, chance: float, what: str) -> None:
        if self._hit(chance):
            raise TierError(f"injected: {what}")

    def open(self, geometry: SlotGeometry) -> Sequence[StoredBlock]:
        self._maybe_fail(self.faults.open, "cannot be opened")
        return self._inner.open(geometry)

    def reserve(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        wanted = [key for key in keys if not self._hit(self.faults.no_slot)]
        slots = dict(zip(wanted, self._inner.reserve(wanted), strict=True))
        return [slots.get(key) for key in keys]

    def commit(self, blocks: Iterable[StoredBlock]) -> None:
        blocks = list(blocks)
        self._maybe_fail(self.faults.commit, "cannot write its records")
        for stored in blocks:
            self.damaged.discard(stored.key)
            where = self._rng.randrange(stored.size_bytes)
            if self._hit(self.faults.corrupt):
                damage(self._inner, stored, where)
                self.damaged.add(stored.key)
            elif self._hit(self.faults.cut) and damage(self._inner, stored, where, all_behind=True):
                self.damaged.add(stored.key)
        self._inner.commit(blocks)

    def probe(self, keys: Sequence[BlockKey]) -> list[StoredBlock | None]:
        self._maybe_fail(self.faults.probe, "cannot be asked")
        return self._inner.probe(keys)

    def evict(self, keys: Iterable[BlockKey]) -> None:
        keys = list(keys)
        self._maybe_fail(self.faults.evict, "cannot write its records")
        self._inner.evict(keys)
        self.damaged.difference_update(keys)

    def make_room(self, keys: Iterable[BlockKey]) -> None:
        keys = list(keys)
        self._maybe_fail(self.faults.evict, "cannot write its records")
        self._inner.make_room(keys)
        if not self.shared:
            self.damaged.difference_update(keys)


def damage(tier: StorageTier, stored: StoredBlock, where: int, *, all_behind: bool = False) -> bool:
    """Flip a bit of byte ``where`` of a block on its medium, or set all bytes from there to 0.

    Returns whether the block changed. Raises ValueError for a tier whose bytes are neither in this
    process's memory nor in files.
    """
    changed: list[bool] = []
    rewrite(tier, stored, lambda data: changed.append(_spoil(data, where, all_behind=all_behind)))
    return changed[0]


def rewrite(tier: StorageTier, stored: StoredBlock, change: Callable[[memoryview], object]) -> None:
    """Let ``change`` change the bytes of a block on its medium. Raises ValueError as ``damage``."""
    span, region = tier.place(stored.slot, stored.size_bytes)
    if tier.memory is Memory.DRAM and tier.peer(stored.slot) is None:
        change(bytes_at(span))
        return
    if tier.memory is not Memory.FILE:
        raise ValueError(f"the bytes of {tier.medium} cannot be reached from here")
    name = "" if region is None else region.name.partition(":")[2]
    path = Path(name or f"/proc/self/fd/{span.device}")
    with path.open("rb+", buffering=0) as file:
        file.seek(span.address)
        data = memoryview(bytearray(file.read(stored.size_bytes)))
        change(data)
        file.seek(span.address)
        file.write(data)


def _spoil(data: memoryview, where: int, *, all_behind: bool) -> bool:
    if not all_behind:
        data[where] ^= 1 << where % 8
        return True
    changed = any(data[where:])
    data[where:] = bytes(len(data) - where)
    return changed

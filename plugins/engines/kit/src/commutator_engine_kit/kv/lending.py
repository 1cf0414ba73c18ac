"""Lends the blocks of a worker's own tier in host memory to other workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import takewhile
from typing import Any

from commutator.contract.tier import (
    ExportOptions,
    Memory,
    RemoteAgent,
    Slot,
    SlotGeometry,
    StorageTier,
)
from commutator.contract.worker import ExportStatistics
from commutator.errors import CommutatorError, EngineHandoverError, TierError
from commutator_engine_kit.kv.block_manager.actions import JobUrgency
from commutator_engine_kit.kv.tiers.executor import TierExecutor, TierThread
from commutator_engine_kit.kv.tiers.guards import GuardedTier
from commutator_engine_kit.kv.transfer.event_loop import EventLoopThread
from commutator_engine_kit.kv.transfer.exporter import BlockExporter
from commutator_engine_kit.kv.transfer.protocol import LentBlocks, LookupRequest, ReadyBlock

log = logging.getLogger(__name__)

OnTier = Callable[[Callable[[], Any]], Future[Any]]
"""Runs a call on the thread that owns the tier, soon; ``Executor.submit`` is one of these."""


class TierExporter:
    """Lends the blocks of one tier in host memory. ``close`` before the tier is closed.

    A lent block is pinned in the tier: it cannot be evicted until its reader releases it, or its
    lease lapses.
    """

    def __init__(
        self,
        tier: StorageTier,
        geometry: SlotGeometry,
        *,
        agent_name: str,
        metadata: Callable[[], bytes],
        on_tier: OnTier,
        options: ExportOptions,
    ) -> None:
        """``metadata`` returns that of the agent with which the tier's regions are registered.

        It is called on the tier's thread.
        """
        self._tier = tier
        self._guarded = GuardedTier(tier, tier.medium)
        self._geometry = geometry
        self._agent_name = agent_name
        self._metadata = metadata
        self._on_tier = on_tier
        self._options = options
        self._exporter = BlockExporter(
            lambda: on_tier(lambda: self._unpin(self._exporter.take_freed())),
            look_up=self._look_up,
            most_blocks=options.max_leased_blocks,
        )
        self._thread: EventLoopThread | None = None
        self._closed = False
        """Touched on the tier's thread only."""
        self.address = ""
        """Where readers ask, "host:port", once it is started."""

    def start(self) -> str:
        """Listen, and return the address for readers. Raises OSError."""

        async def start() -> str:
            return self._exporter.start(self._options.host, self._options.port)

        self._thread = EventLoopThread("kv-exporter")
        try:
            host, _, port = self._thread.run(start()).rpartition(":")
        except OSError:
            self._thread.close()
            raise
        self.address = f"{self._options.advertise or host}:{port}"
        return self.address

    def statistics(self) -> ExportStatistics:
        return self._exporter.statistics()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop answering and end all leases. Reads under way may fail, or read other bytes."""
        if self._thread is not None:
            self._thread.close()
        with suppress(CommutatorError, TimeoutError):
            self._on_tier(self._end_leases).result(timeout_s)

    async def _look_up(self, request: LookupRequest) -> LentBlocks:
        lent: LentBlocks = await asyncio.wrap_future(self._on_tier(lambda: self._lend(request)))
        return lent

    # What follows runs on the tier's thread.

    def _lend(self, request: LookupRequest) -> LentBlocks:
        geometry, lease_s = self._geometry, self._options.lease_s
        blocks: list[ReadyBlock] = []
        fits = (request.identity, request.slot_bytes) == (geometry.identity, geometry.slot_bytes)
        if fits and not self._closed:
            # A block that is asked for twice would be lent twice under one lease.
            keys = list(dict.fromkeys(request.keys))[: self._exporter.room()]
            found = self._guarded.lookup(keys) or ()
            for stored in takewhile(lambda stored: stored is not None, found):
                assert stored is not None, "takewhile saw to it"
                span, _ = self._tier.place(stored.slot, stored.size_bytes)
                if not self._guarded.pin(stored.slot):
                    break
                blocks.append(ReadyBlock(stored.slot, stored.key, stored.checksum, span))
        if not blocks:
            return LentBlocks(RemoteAgent(name=self._agent_name, metadata=b""), lease_s)
        lent = False
        try:
            lent = self._exporter.lend(request.id, blocks, lease_s)
        finally:
            if not lent:
                self._unpin([block.index for block in blocks])
        if not lent:
            raise EngineHandoverError(f"look-up {request.id} is released already")
        return LentBlocks(
            RemoteAgent(name=self._agent_name, metadata=self._metadata()), lease_s, tuple(blocks)
        )

    def _unpin(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._guarded.unpin(slot)

    def _end_leases(self) -> None:
        self._closed = True
        self._unpin(self._exporter.fail_all("the exporter is closed"))


def on_tier(thread: TierThread) -> OnTier:
    """Runs calls on a tier's thread. The future raises TierError while the tier is not open."""

    def run(call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def job(worker: TierExecutor | None) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    if worker is None:
                        raise TierError("the tier is not open")  # noqa: TRY301
                    future.set_result(call())
                except Exception as error:  # noqa: BLE001 - the caller's to handle
                    future.set_exception(error)

        thread.submit(JobUrgency.FREE, job)
        return future

    return run


def lend(threads: Sequence[TierThread]) -> TierExporter | None:
    """Let other workers read the blocks in host memory, if a tier says how.

    None when no tier says so; also, with a warning, when there is nothing to lend or the address
    cannot be listened on.
    """
    setups = [thread.worker.setup for thread in threads]
    options = next((o for each in setups if (o := each.guarded.export_options()) is not None), None)
    if options is None:
        return None
    for thread in threads:
        worker, tier = thread.worker, thread.worker.setup.tier
        if tier.memory is not Memory.DRAM or not tier.writable or tier.shared:
            continue
        exporter = TierExporter(
            tier,
            worker.geometry,
            agent_name=worker.agent_name,
            metadata=worker.metadata,
            on_tier=on_tier(thread),
            options=options,
        )
        try:
            address = exporter.start()
        except OSError as error:
            log.warning("blocks are not lent: cannot listen on %s: %s", options.host, error)
            return None
        log.info("blocks of tier %s are lent at %s", worker.setup.name, address)
        return exporter
    log.warning("blocks are not lent: this worker has no tier of its own in host memory")
    return None

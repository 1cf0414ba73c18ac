"""The KV connector: an engine's interface to the storage tiers.

The block manager decides under one lock, and each tier's thread moves that tier's bytes. An engine
with its own block pool calls ``poll`` once a step; one that only waits for futures calls
``poll_on_own_thread``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from attrs import evolve

from commutator.contract.block import CacheIdentity, KvEvent
from commutator.contract.tier import StoredBlock
from commutator.contract.worker import KvExchange, KvStatistics
from commutator.errors import TierError
from commutator_engine_kit.kv.arena import Arena
from commutator_engine_kit.kv.block_manager.actions import JobUrgency
from commutator_engine_kit.kv.block_manager.manager import BlockManager
from commutator_engine_kit.kv.groups import KvGroup, group_identities, sequence_bytes, whole
from commutator_engine_kit.kv.lending import TierExporter, lend
from commutator_engine_kit.kv.loads import Loads
from commutator_engine_kit.kv.lookups import Lookups
from commutator_engine_kit.kv.stores import Stores
from commutator_engine_kit.kv.tier_stack import EventQueue, Polled, TierStack
from commutator_engine_kit.kv.tiers.block_io import STAGING_BLOCKS, Staging
from commutator_engine_kit.kv.tiers.executor import Job, TierExecutor, TierThread
from commutator_engine_kit.kv.tiers.setup import TierEntries, TierSetup, read_tiers

log = logging.getLogger(__name__)

_POLL_S = 0.05
"""Longest time between two polls of the connector's own thread."""


class KvConnector:
    """The tiers of one engine, fastest first: look blocks up, load them, store them.

    Any thread may call any method; only ``start`` and ``close`` wait. The device blocks passed to
    ``loads.onboard`` and ``stores.offload`` belong to the connector until ``poll`` lists them in
    ``Polled.released``, or the call's future is done.

    Futures are completed on any thread, with no lock held; their callbacks must not wait.
    """

    lookups: Lookups
    """Which blocks of a prompt the tiers have."""
    loads: Loads
    """From tiers into device blocks."""
    stores: Stores
    """From device blocks into tiers."""

    def __init__(
        self,
        tiers: TierEntries,
        arena: Arena,
        identity: CacheIdentity,
        *,
        worker_id: str,
        groups: Sequence[KvGroup] = (),
        reports_evictions: bool = False,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the tiers; ``start`` opens them. Raises what ``read_tiers`` raises.

        ``arena`` is the engine's KV memory, which must stay allocated until ``close`` has returned.
        ``identity`` is that of blocks without adapter and cache salt. ``worker_id`` replaces
        ``{worker}`` in the tiers' options; it is unique among the processes that run at a time.
        ``groups`` are the model's kinds of KV, whose blocks share the arena; without, all layers
        read every token. ``reports_evictions``: the engine calls ``stores.offload_evicted`` before
        it reuses a block; without that, tiers with `write: on_evict` store blocks once they are
        computed. ``wake`` is called, from any thread and with no lock held, when ``poll`` has news
        or a future is done.
        """
        self.identity = identity
        self.groups = tuple(groups) or whole(identity.block_size, arena.block_bytes)
        """The model's kinds of KV."""
        self.tiers: tuple[TierSetup, ...] = read_tiers(tiers, worker_id)
        """Fastest first."""
        self.takes_computed = any(setup.write == "through" for setup in self.tiers)
        """Whether a tier stores blocks as soon as they are computed."""
        writes = (setup.write for setup in self.tiers if setup.write != "never")
        self.takes_evicted = next(writes, "never") == "on_evict"
        """Whether the fastest writable tier stores the blocks that the engine evicts."""
        self.counts_uses = any(setup.config.admission.min_hits > 1 for setup in self.tiers)
        """Whether an admission rule needs the number of a block's uses."""
        self._wake = wake
        self._news: threading.Event | None = None
        self._poller: threading.Thread | None = None
        self._recovered: dict[int, Sequence[StoredBlock]] = {}
        """The blocks of tiers that were opened before the block manager was made."""
        self._peers: tuple[str, ...] = ()
        self._lending: TierExporter | None = None
        self._queue = EventQueue(self._woken)
        scratch = Staging(arena.block_bytes, STAGING_BLOCKS)
        agent_name = f"{worker_id}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        threads = [
            TierThread(
                TierExecutor(
                    setup,
                    arena,
                    scratch,
                    block_tokens=max(group.block_size for group in self.groups),
                    identity=identity.digest.hex(),
                    agent_name=f"{agent_name}/{number}-{setup.name}",
                    on_open=partial(self._opened, number),
                ),
                on_up=partial(self._tier_up, number),
                on_down=partial(self._tier_down, number),
            )
            for number, setup in enumerate(self.tiers)
        ]
        for setup in self.tiers:
            setup.guarded.use_peers(lambda: self._peers)
        stack = self._stack = TierStack(arena, self._queue, threads)
        self.stores = Stores(self.groups, stack, scratch, at_once=not reports_evictions)
        self.loads = Loads(stack, self.groups, self.stores.carry_out)
        identities = group_identities(identity, self.groups)
        self.lookups = Lookups(identities, stack, self.loads, self.stores.carry_out)

    def start(self, timeout_s: float = 60.0) -> None:
        """Open every tier. A tier that fails to open is tried again in the background."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._stack.threads:
            thread.start()
        for thread in self._stack.threads:
            thread.tried.wait(max(0.0, deadline_s - time.monotonic()))
        with self._queue:
            manager = self._stack.opened = BlockManager([setup.spec() for setup in self.tiers])
            for number, thread in enumerate(self._stack.threads):
                if not thread.usable:
                    self.stores.carry_out(manager.tier_down(number, time.monotonic()))
            for number, blocks in self._recovered.items():
                self.stores.carry_out(manager.recovered(number, blocks, time.monotonic()))
            self._recovered.clear()
        self._lending = lend(self._stack.threads)

    def poll_on_own_thread(
        self, on_events: Callable[[Sequence[KvEvent]], None] = lambda _: None
    ) -> None:
        """Poll on the connector's own thread until ``close``; the engine must not poll itself.

        ``on_events`` is called on that thread with the tiers' KV events, in order.
        """
        self._news = threading.Event()
        self._poller = threading.Thread(
            target=self._poll_until_closed,
            args=(self._news, on_events),
            name="kv-connector",
            daemon=True,
        )
        self._poller.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Give up running jobs and close the tiers.

        The futures of onboards and offloads that have not ended fail with TierError: NIXL may still
        touch their blocks. Unanswered look-ups are cancelled.
        """
        with self._queue:
            self._stack.closed = True
            self.loads.cancel_all()
        if self._lending is not None:
            self._lending.close()
        for thread in self._stack.threads:
            thread.stop()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._stack.threads:
            thread.join(max(0.1, deadline_s - time.monotonic()))
        if self._poller is not None and self._news is not None:
            self._news.set()
            self._poller.join(timeout_s)
        error = TierError("the tiers were closed before they released these blocks")
        with self._queue:
            self.lookups.forget_all()
            self.loads.fail(error)
            self.stores.fail(error)

    def poll(self) -> Polled:
        """Events since the last call. Gives up onboards and look-ups that take too long."""
        with self._queue:
            if self._stack.opened is not None:
                now_s = time.monotonic()
                self.loads.expire(now_s)
                self.lookups.expire(now_s)
            return self._queue.take()

    def statistics(self) -> KvStatistics:
        """The counters and states of all tiers."""
        with self._queue:
            counted = self._stack.manager.statistics()
        return evolve(counted, sequence_bytes=sequence_bytes(self.groups))

    @property
    def idle(self) -> bool:
        """Whether no onboard and no store is running."""
        statistics = self.statistics()
        return not (statistics.loads_running or statistics.stores_running)

    @property
    def exchange(self) -> KvExchange | None:
        """How blocks are shared with other workers; None when no tier reads from them."""
        if not any(setup.tier.asks_peers for setup in self.tiers):
            return None
        return KvExchange(address=None if self._lending is None else self._lending.address)

    def use_peers(self, addresses: Sequence[str]) -> None:
        """Set the addresses at which other workers of the same model lend blocks."""
        self._peers = tuple(addresses)

    def on_tier(self, tier: int, urgency: JobUrgency, job: Job) -> None:
        """Run a job on a tier's own thread."""
        self._stack.threads[tier].submit(urgency, job)

    # What follows is called with the lock held, or takes it on a tier's thread.

    def _woken(self) -> None:
        if self._news is not None:
            self._news.set()
        self._wake()

    def _poll_until_closed(
        self, news: threading.Event, on_events: Callable[[Sequence[KvEvent]], None]
    ) -> None:
        while not self._stack.closed:
            news.wait(_POLL_S)
            news.clear()
            try:
                if events := self.poll().events:
                    on_events(events)
            except Exception:  # later polls must still complete futures
                log.exception("KV connector: poll failed; polling continues")

    def _opened(self, tier: int, blocks: Sequence[StoredBlock]) -> None:
        with self._queue:
            if self._stack.opened is None:
                self._recovered[tier] = blocks
            else:
                capacity, now_s = self.tiers[tier].capacity, time.monotonic()
                self.stores.carry_out(self._stack.manager.opened(tier, capacity, blocks, now_s))

    def _tier_up(self, tier: int) -> None:
        with self._queue:
            if self._stack.opened is not None:
                self.stores.carry_out(self._stack.manager.tier_up(tier, time.monotonic()))

    def _tier_down(self, tier: int, reason: str) -> None:
        log.warning("tier %s: paused: %s", self.tiers[tier].name, reason)
        with self._queue:
            if self._stack.opened is not None:
                self.stores.carry_out(self._stack.manager.tier_down(tier, time.monotonic()))

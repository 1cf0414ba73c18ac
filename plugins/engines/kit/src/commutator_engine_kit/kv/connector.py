"""The KV connector: an engine's interface to the storage tiers.

The block manager decides under one lock, and each tier's thread moves that tier's bytes. An engine
with its own block pool calls ``poll`` once a step; one that only waits for futures calls
``poll_on_own_thread``.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from typing import TypeVar

from attrs import evolve

from commutator.contract.block import (
    BlockDescriptor,
    BlockKey,
    CacheIdentity,
    KvEvent,
    RetentionHints,
    block_keys,
)
from commutator.contract.tier import StoredBlock
from commutator.contract.worker import BlockExplanation, KvExchange, KvStatistics
from commutator.errors import TierError
from commutator_engine_kit.kv.arena import Arena
from commutator_engine_kit.kv.block_manager.actions import (
    DEVICE,
    Action,
    Announce,
    FreeBlocks,
    JobUrgency,
    LoadResult,
    ReleaseSource,
    StoreBlocks,
    announced,
)
from commutator_engine_kit.kv.block_manager.admission import count_uses
from commutator_engine_kit.kv.block_manager.break_even import PrefillSpeed
from commutator_engine_kit.kv.block_manager.manager import BlockManager
from commutator_engine_kit.kv.in_flight import (
    EventQueue,
    FinishedOnboard,
    Lookups,
    Offload,
    OnboardJobs,
    OnboardTicket,
    Polled,
    settle,
)
from commutator_engine_kit.kv.lending import TierExporter, lend
from commutator_engine_kit.kv.tiers.executor import TierExecutor
from commutator_engine_kit.kv.tiers.jobs import TierMove, store_job
from commutator_engine_kit.kv.tiers.setup import TierEntries, TierSetup, read_tiers
from commutator_engine_kit.kv.tiers.staged_io import STAGING_BLOCKS, Staging
from commutator_engine_kit.kv.tiers.thread import Job, TierThread

__all__ = ["FinishedOnboard", "KvConnector", "OnboardTicket", "Polled"]

log = logging.getLogger(__name__)

_POLL_S = 0.05
"""Longest time between two polls of the connector's own thread."""

ResultT = TypeVar("ResultT")


class KvConnector:
    """The tiers of one engine, fastest first.

    Any thread may call any method; only ``start`` and ``close`` wait. The device blocks passed to
    ``onboard`` and ``offload`` belong to the connector until ``poll`` lists them in
    ``Polled.released``, or the call's future is done.

    Futures are completed on any thread, with no lock held; their callbacks must not wait.
    """

    def __init__(
        self,
        tiers: TierEntries,
        arena: Arena,
        identity: CacheIdentity,
        *,
        worker_id: str,
        reports_evictions: bool = False,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the tiers; ``start`` opens them. Raises what ``read_tiers`` raises.

        ``arena`` is the engine's KV memory, which must stay allocated until ``close`` has returned.
        ``identity`` is that of blocks without adapter and cache salt. ``worker_id`` replaces
        ``{worker}`` in the tiers' options; it is unique among the processes that run at a time.
        ``reports_evictions``: the engine calls ``offload_evicted`` before it reuses a block;
        without that, tiers with `write: on_evict` store blocks once they are computed. ``wake`` is
        called, from any thread and with no lock held, when ``poll`` has news or a future is done.
        """
        self.identity = identity
        self.tiers: tuple[TierSetup, ...] = read_tiers(tiers, worker_id)
        """Fastest first."""
        self._arena = arena
        self._wake = wake
        self._queue = EventQueue(self._woken)
        self._manager: BlockManager | None = None
        self._closed = False
        self._peers: tuple[str, ...] = ()
        self._lending: TierExporter | None = None
        self._scratch = Staging(arena.block_bytes, STAGING_BLOCKS)
        agent_name = f"{worker_id}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._threads = [
            TierThread(
                TierExecutor(
                    setup,
                    arena,
                    self._scratch,
                    block_tokens=identity.block_size,
                    identity=identity.digest.hex(),
                    agent_name=f"{agent_name}/{number}-{setup.name}",
                    on_open=partial(self._opened, number),
                ),
                on_up=partial(self._tier_up, number),
                on_down=partial(self._tier_down, number),
            )
            for number, setup in enumerate(self.tiers)
        ]
        self._onboards = OnboardJobs(self._threads, arena, self._queue, self._finish_onboard)
        self._lookups = Lookups(self._threads, self._queue, self._found)
        self._numbers = itertools.count(1)
        self._offloads: dict[BlockKey, list[tuple[int, Offload]]] = {}
        """Device blocks that stores read, or will read."""
        self._recovered: dict[int, Sequence[StoredBlock]] = {}
        """The blocks of tiers that were opened before the block manager was made."""
        for setup in self.tiers:
            setup.guarded.use_peers(lambda: self._peers)
        self.takes_computed = any(setup.write == "through" for setup in self.tiers)
        """Whether a tier stores blocks as soon as they are computed."""
        writes = (setup.write for setup in self.tiers if setup.write != "never")
        self.takes_evicted = next(writes, "never") == "on_evict"
        """Whether the fastest writable tier stores the blocks that the engine evicts."""
        self.counts_uses = count_uses(setup.spec().admission for setup in self.tiers)
        """Whether an admission rule needs the number of a block's uses."""
        self._evicts_at_once = not reports_evictions
        self._news: threading.Event | None = None
        self._poller: threading.Thread | None = None

    def start(self, timeout_s: float = 60.0) -> None:
        """Open every tier. A tier that fails to open is tried again in the background."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.tried.wait(max(0.0, deadline_s - time.monotonic()))
        with self._queue:
            manager = self._manager = BlockManager([setup.spec() for setup in self.tiers])
            for number, thread in enumerate(self._threads):
                if not thread.usable:
                    self._carry_out(manager.tier_down(number, time.monotonic()))
            for number, blocks in self._recovered.items():
                self._carry_out(manager.recovered(number, blocks, time.monotonic()))
            self._recovered.clear()
        self._lending = lend(self._threads)

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
            self._closed = True
            self._onboards.cancel_all()
        if self._lending is not None:
            self._lending.close()
        for thread in self._threads:
            thread.stop()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.1, deadline_s - time.monotonic()))
        if self._poller is not None and self._news is not None:
            self._news.set()
            self._poller.join(timeout_s)
        error = TierError("the tiers were closed before they released these blocks")
        with self._queue:
            self._lookups.forget_all()
            self._onboards.fail(error)
            for sources in self._offloads.values():
                for _, offload in sources:
                    self._queue.after(partial(settle, offload.future, error))

    def keys(
        self,
        token_ids: Sequence[int],
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        known: Sequence[BlockKey] = (),
    ) -> list[BlockKey]:
        """The key of every full block of a prompt; ``known`` has the keys of its first blocks."""
        identity = evolve(self.identity, adapter=adapter, cache_salt=cache_salt)
        return block_keys(identity, token_ids, known)

    def key_of(
        self, name: bytes, *, adapter: str | None = None, cache_salt: str | None = None
    ) -> BlockKey:
        """The key of the block that the engine calls ``name``, with this adapter and salt.

        The name must depend on the block's tokens and on all tokens before them.
        """
        identity = evolve(self.identity, adapter=adapter, cache_salt=cache_salt)
        return sha256(b"named" + identity.digest + name).digest()

    def descriptors(
        self,
        keys: Sequence[BlockKey],
        token_ids: Sequence[int],
        *,
        first: int = 0,
        prompt_blocks: int | None = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> list[BlockDescriptor]:
        """Descriptors of a chain's blocks from ``first`` on, for ``offload``.

        The blocks from ``prompt_blocks`` on belong to the answer. Blocks without ``token_ids``,
        where only their names are known, cause no KV events.
        """
        size = self.identity.block_size
        return [
            BlockDescriptor(
                key=keys[index],
                parent=keys[index - 1] if index else None,
                token_ids=tuple(token_ids[index * size : (index + 1) * size]),
                adapter=adapter,
                facts=RetentionHints(
                    is_prompt=prompt_blocks is None or index < prompt_blocks,
                    tenant=cache_salt,
                    depth=index,
                ),
            )
            for index in range(first, len(keys))
        ]

    def plan(
        self,
        keys: Sequence[BlockKey],
        *,
        first: int = 0,
        tokens_per_s: float | None = None,
        request_id: str | None = None,
    ) -> Future[OnboardTicket]:
        """Choose the blocks of a prompt, from ``first`` on, to onboard rather than to compute.

        ``tokens_per_s`` is the engine's speed at prompts; None: onboard every block that is found.
        Shared tiers are asked for blocks that are not known here, which takes at most a second;
        without such a look-up, the future is done at once. Cancel it when the answer is no longer
        needed. ``prefetch`` and ``plan`` with the same ``request_id`` ask shared tiers once.
        """
        prefill = PrefillSpeed(tokens_per_s=tokens_per_s, block_size=self.identity.block_size)
        name = uuid.uuid4().hex if request_id is None else request_id

        def decide() -> OnboardTicket:
            ticket_id, now_s = str(next(self._numbers)), time.monotonic()
            plan = self._started.begin_onboard(ticket_id, keys, first, now_s, prefill=prefill)
            media = tuple(self.tiers[tier].tier.medium for _, tier in plan.blocks)
            ticket = OnboardTicket(id=ticket_id, request_id=name, first=first, media=media)
            if plan.blocks:
                self._onboards.planned(ticket, plan.blocks)
            return ticket

        return self._after_look_up(keys, first, name, decide, forget=True, unwanted=self.cancel)

    def look_up(
        self, keys: Sequence[BlockKey], *, first: int = 0, request_id: str | None = None
    ) -> Future[None]:
        """Ask shared tiers for the blocks from ``first`` on that no tier is known to have."""
        return self._after_look_up(keys, first, request_id, lambda: None)

    def prefetch(
        self, keys: Sequence[BlockKey], *, first: int = 0, request_id: str | None = None
    ) -> Future[None]:
        """Copy a prompt's blocks from slower tiers to the fastest, as they may be needed soon.

        Done when the copies have begun. With a ``request_id``, the answers of shared tiers are
        remembered for ``plan``; call ``forget`` if no ``plan`` follows.
        """

        def copy() -> None:
            self._carry_out(self._started.prefetch(keys, first, time.monotonic()))

        return self._after_look_up(keys, first, request_id, copy)

    def forget(self, request_id: str) -> None:
        """Cancel the request's look-ups in shared tiers, and forget their answers."""
        with self._queue:
            self._lookups.forget(request_id)

    def onboard(
        self, ticket: OnboardTicket, device_blocks: Sequence[int], *, skip: int = 0
    ) -> Future[list[bool]]:
        """Read the ticket's blocks from number ``skip`` on into device blocks.

        The result has True for each block that was read and verified; no True follows a False. The
        ticket's other blocks are not onboarded. Blocks for which a tier's thread has no time before
        their deadline are given up. Done when no tier touches the device blocks any more;
        ``Polled.onboards`` has the result earlier if a transfer was abandoned. Raises TierError
        once the tiers are closed, ValueError when the ticket does not have these blocks or was used
        before.
        """
        with self._queue:
            self._must_be_open()
            return self._onboards.start(ticket, device_blocks, skip)

    def cancel(self, ticket: OnboardTicket) -> None:
        """Cancel a planned or started onboard. The future of a started one is done soon."""
        with self._queue:
            self._onboards.cancel(ticket.id)

    def offload(
        self, blocks: Sequence[BlockDescriptor], device_blocks: Sequence[int]
    ) -> Future[None]:
        """Store blocks that the engine computed or reused, in the order of their chain.

        Done when no tier reads the device blocks any more. Offload reused blocks, too: for a block
        that is stored already, this counts as a use. Raises TierError once the tiers are closed.
        """
        offer = partial(self._started.offer, at_once=self._evicts_at_once)
        return self._offload(blocks, device_blocks, offer)

    def offload_evicted(
        self, blocks: Sequence[BlockDescriptor], device_blocks: Sequence[int]
    ) -> Future[None]:
        """Store blocks that the engine evicts. It may overwrite each once it is released.

        Raises TierError once the tiers are closed.
        """
        return self._offload(blocks, device_blocks, self._started.offload_evicted)

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Count a use of blocks that the engine computed or reused and does not offload."""
        with self._queue:
            self._started.used(keys)

    def admissible(self, blocks: Sequence[BlockDescriptor]) -> set[BlockKey]:
        """The keys of blocks that no tier has, and that a tier would store if evicted now."""
        with self._queue:
            return self._started.admissible(blocks)

    def poll(self) -> Polled:
        """Events since the last call. Gives up onboards and look-ups that take too long."""
        with self._queue:
            if self._manager is not None:
                now_s = time.monotonic()
                self._onboards.expire(now_s)
                self._lookups.expire(now_s)
            return self._queue.take()

    def evict(
        self,
        keys: Iterable[BlockKey] | None = None,
        tier: str | None = None,
        reason: str = "asked",
    ) -> None:
        """Remove blocks (None: all) from one tier or all. ``reason`` names the counter."""
        number = None if tier is None else [setup.name for setup in self.tiers].index(tier)
        with self._queue:
            now_s = time.monotonic()
            self._carry_out(self._started.evict(now_s, keys=keys, tier=number, reason=reason))

    def explain(self, keys: Sequence[BlockKey], first: int = 0) -> list[BlockExplanation]:
        """Say of each block of a prompt which tiers have it, and whether it would be reused."""
        with self._queue:
            return self._started.explain(keys, time.monotonic(), first)

    def statistics(self) -> KvStatistics:
        """The counters and states of all tiers."""
        with self._queue:
            return self._started.statistics()

    def check_integrity(self) -> None:
        """Raise AssertionError when the block manager's state is inconsistent."""
        with self._queue:
            self._started.check_integrity()

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
        self._threads[tier].submit(urgency, job)

    # What follows is called with the lock held, or takes it on a tier's thread.

    @property
    def _started(self) -> BlockManager:
        assert self._manager is not None, "start() comes first"
        return self._manager

    def _must_be_open(self) -> None:
        if self._closed:
            raise TierError("the tiers are closed")

    def _woken(self) -> None:
        if self._news is not None:
            self._news.set()
        self._wake()

    def _poll_until_closed(
        self, news: threading.Event, on_events: Callable[[Sequence[KvEvent]], None]
    ) -> None:
        while not self._closed:
            news.wait(_POLL_S)
            news.clear()
            try:
                if events := self.poll().events:
                    on_events(events)
            except Exception:  # later polls must still complete futures
                log.exception("KV connector: poll failed; polling continues")

    def _after_look_up(
        self,
        keys: Sequence[BlockKey],
        first: int,
        request_id: str | None,
        decide: Callable[[], ResultT],
        *,
        forget: bool = False,
        unwanted: Callable[[ResultT], None] = lambda _: None,
    ) -> Future[ResultT]:
        """A future of the result of ``decide``, which is called once shared tiers have answered.

        ``forget``: forget the request's answers then, as always without a ``request_id``.
        ``unwanted`` gets the result if the future was cancelled in the meantime.
        """
        future: Future[ResultT] = Future()
        name = uuid.uuid4().hex if request_id is None else request_id

        def complete(result: ResultT) -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(result)
            else:
                unwanted(result)

        def answered() -> None:
            if forget or request_id is None:
                self._lookups.forget(name)
            if not future.cancelled():
                self._queue.after(partial(complete, decide()))

        with self._queue:
            known = first + len(self._started.match(keys, first))
            self._lookups.ask(name, keys, known, future, answered)
        return future

    def _offload(
        self,
        blocks: Sequence[BlockDescriptor],
        device_blocks: Sequence[int],
        take: Callable[[Sequence[BlockDescriptor], float], list[Action]],
    ) -> Future[None]:
        if len(blocks) != len(device_blocks):
            raise ValueError(f"{len(blocks)} blocks, but {len(device_blocks)} device blocks")
        offload = Offload(len(blocks))
        with self._queue:
            self._must_be_open()
            for block, device_block in zip(blocks, device_blocks, strict=True):
                self._offloads.setdefault(block.key, []).append((device_block, offload))
            self._carry_out(take(blocks, time.monotonic()))
        if not blocks:
            settle(offload.future, None)
        return offload.future

    def _finish_onboard(
        self, ticket_id: str, results: dict[BlockKey, LoadResult], seconds: dict[int, float]
    ) -> None:
        now_s = time.monotonic()
        self._carry_out(self._started.finish_onboard(ticket_id, results, now_s, seconds=seconds))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Announce():
                    self._queue.report(events=announced(action, self.identity.block_size))
                case ReleaseSource():
                    self._queue.report(released=[self._released(key) for key in action.keys])
                case FreeBlocks():
                    self._threads[action.tier].submit(JobUrgency.FREE, partial(_free, action))
                case StoreBlocks():
                    self._store(action)

    def _released(self, key: BlockKey) -> int:
        sources = self._offloads[key]
        device_block, offload = sources.pop()
        if not sources:
            del self._offloads[key]
        offload.blocks -= 1
        if not offload.blocks:
            self._queue.after(partial(settle, offload.future, None))
        return device_block

    def _store(self, action: StoreBlocks) -> None:
        target = self._threads[action.target]
        done = partial(self._stored, action.move_id)
        if action.source == DEVICE:
            keys = [block.key for block in action.offers]
            spans = [self._arena.span(self._offloads[key][-1][0]) for key in keys]
            job = store_job(action.offers, spans, from_engine=True, done=done)
            target.submit(action.priority, job)
            return
        TierMove(
            offers=list(action.offers),
            source=self._threads[action.source],
            target=target,
            scratch=self._scratch,
            urgency=action.priority,
            done=done,
        ).start()

    def _stored(self, move_id: int, stored: list[StoredBlock], failed: dict[BlockKey, str]) -> None:
        with self._queue:
            now_s = time.monotonic()
            self._carry_out(self._started.finish_store(move_id, stored, failed, now_s))

    def _found(self, tier: int, blocks: Sequence[StoredBlock]) -> None:
        self._carry_out(self._started.found(tier, blocks, time.monotonic()))

    def _opened(self, tier: int, blocks: Sequence[StoredBlock]) -> None:
        with self._queue:
            if self._manager is None:
                self._recovered[tier] = blocks
            else:
                capacity, now_s = self.tiers[tier].capacity, time.monotonic()
                self._carry_out(self._manager.opened(tier, capacity, blocks, now_s))

    def _tier_up(self, tier: int) -> None:
        with self._queue:
            if self._manager is not None:
                self._carry_out(self._manager.tier_up(tier, time.monotonic()))

    def _tier_down(self, tier: int, reason: str) -> None:
        log.warning("tier %s: paused: %s", self.tiers[tier].name, reason)
        with self._queue:
            if self._manager is not None:
                self._carry_out(self._manager.tier_down(tier, time.monotonic()))


def _free(action: FreeBlocks, worker: TierExecutor | None) -> Generator[None, None, None]:
    if worker is not None:
        worker.free(action.keys, makes_room=action.makes_room)
    yield from ()

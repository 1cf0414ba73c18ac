"""The KV manager at work: decisions under one lock, each tier's bytes on the tier's own thread.

The engine's thread calls ``plan``, ``start_load``, ``offer``, ``evicting`` and, once a step,
``poll``. None of them waits for bytes. A device block that was handed over, to be written by a load
or read by a store, belongs to the service until ``poll`` gives it back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from attrs import frozen

from commutator.kv.actions import (
    DEVICE,
    Action,
    Announce,
    FreeBlocks,
    ReleaseSource,
    StoreBlocks,
    Urgency,
)
from commutator.kv.break_even import PrefillSpeed
from commutator.kv.counters import KvStatistics
from commutator.kv.event_words import announced
from commutator.kv.keys import BlockKey
from commutator.kv.manager import KvManager
from commutator.kv.offer import Offer
from commutator.kv.peer_export import PeerExport
from commutator.kv.scattered_arena import Arena
from commutator.kv.service_jobs import free_job, store_job
from commutator.kv.service_loads import ServiceLoads
from commutator.kv.service_probes import Probes
from commutator.kv.service_state import FinishedLoad, Outbox, Polled
from commutator.kv.service_threads import STAGING_BLOCKS, lend, make_threads
from commutator.kv.staging import Staging
from commutator.kv.tier import Stored
from commutator.kv.tier_move import TierMove
from commutator.kv.tier_setup import TierSetup
from commutator.kv.tier_thread import Job, JobUrgency
from commutator.kv.why import BlockWhy
from commutator.types import KvExchange

__all__ = ["FinishedLoad", "KvService", "Polled"]

log = logging.getLogger(__name__)

_URGENCY = {
    Urgency.MAKE_ROOM: JobUrgency.MAKE_ROOM,
    Urgency.BACKGROUND: JobUrgency.OFFLOAD,
    Urgency.PREFETCH: JobUrgency.PREFETCH,
}


@frozen
class _Running:
    """What there is once every tier was tried."""

    manager: KvManager
    loads: ServiceLoads
    probes: Probes


class KvService:
    """The tiers of one engine, fastest first. Any thread may call any method.

    ``wake`` is called, from any thread, when ``poll`` has something; no lock is held then.
    """

    def __init__(
        self,
        setups: Sequence[TierSetup],
        arena: Arena,
        *,
        block_size: int,
        identity: str,
        agent_name: str,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """``identity`` is the hex digest of what all blocks have in common, codecs apart."""
        self._setups = tuple(setups)
        self._arena = arena
        self._block_size = block_size
        self._outbox = Outbox(wake)
        self._sources: dict[BlockKey, list[int]] = {}
        self._recovered: dict[int, Sequence[Stored]] = {}
        self._running: _Running | None = None
        self._peers: tuple[str, ...] = ()
        self._lending: tuple[PeerExport, str] | None = None
        self._scratch = Staging(arena.block_bytes, STAGING_BLOCKS)
        self._threads = make_threads(
            setups,
            arena,
            self._scratch,
            block_size=block_size,
            identity=identity,
            agent_name=agent_name,
            callbacks=(self._opened, self._tier_up, self._tier_down),
        )
        for setup in setups:
            setup.tier.use_peers(lambda: self._peers)

    def start(self, timeout_s: float = 60.0) -> None:
        """Open every tier. One that cannot be opened now is tried again in the background."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.tried.wait(max(0.0, deadline_s - time.monotonic()))
        with self._outbox:
            manager = KvManager([setup.spec() for setup in self._setups])
            self._running = _Running(
                manager,
                ServiceLoads(
                    manager,
                    self._setups,
                    self._threads,
                    self._arena,
                    self._outbox,
                    self._carry_out,
                ),
                Probes(self._setups, self._threads, self._outbox, self._found),
            )
            for number, thread in enumerate(self._threads):
                if not thread.usable:
                    self._carry_out(manager.tier_down(number, time.monotonic()))
            for number, blocks in self._recovered.items():
                self._carry_out(manager.recovered(number, blocks, time.monotonic()))
            self._recovered.clear()
        self._lending = lend(self._threads)

    @property
    def exchange(self) -> KvExchange | None:
        """How blocks are shared with other workers; None when no tier does that."""
        if not any(setup.tier.asks_peers for setup in self._setups):
            return None
        return KvExchange(None if self._lending is None else self._lending[1])

    def use_peers(self, addresses: Sequence[str]) -> None:
        """Where other workers of the same model lend their blocks now."""
        self._peers = tuple(addresses)

    def plan(
        self, load_id: str, keys: Sequence[BlockKey], first: int, prefill: PrefillSpeed
    ) -> int | None:
        """How many blocks of ``keys`` from ``first`` on are worth loading; these are kept.

        None: a shared tier is being asked; ask again when ``poll`` had something. A plan of more
        than 0 blocks must be followed by ``start_load`` or ``drop``.
        """
        running = self._started
        with self._outbox:
            if self.must_ask(load_id, keys, first):
                return None
            now_s = time.monotonic()
            plan = running.manager.begin_load(load_id, keys, first, now_s, prefill=prefill)
            if plan.blocks:
                running.loads.planned(load_id, plan.blocks)
            return len(plan.blocks)

    def planned_media(self, load_id: str) -> tuple[str, ...]:
        """The medium that each block of a plan is to be loaded from."""
        with self._outbox:
            numbers = self._started.loads.tiers_of(load_id)
        return tuple(self._setups[number].tier.medium for number in numbers)

    def must_ask(self, ask_id: str, keys: Sequence[BlockKey], first: int) -> bool:
        """Whether a shared tier is still being asked for blocks that no tier is known to have.

        Begins to ask with the first call for ``ask_id``; ``drop`` ends it early.
        """
        running = self._started
        with self._outbox:
            known = first + len(running.manager.match(keys, first))
            if running.probes.must_wait(ask_id, keys, known, time.monotonic()):
                return True
            running.probes.forget(ask_id)
            return False

    def prefetch(self, ask_id: str, keys: Sequence[BlockKey], first: int) -> bool:
        """Bring a prompt's blocks up from slower tiers: it will be asked for soon, perhaps.

        False: a shared tier is being asked; call again when ``poll`` had something. What it
        answered is kept for a load under the same id: ``drop`` it if there will be none.
        """
        running = self._started
        with self._outbox:
            now_s = time.monotonic()
            known = first + len(running.manager.match(keys, first))
            if running.probes.must_wait(ask_id, keys, known, now_s):
                return False
            self._carry_out(running.manager.prefetch(keys, first, now_s))
            return True

    def start_load(self, load_id: str, device_blocks: Sequence[int], skip: int = 0) -> None:
        """Begin to fill device blocks with the planned blocks from number ``skip`` on.

        Each comes back by ``Polled.released``; those of the finished load's first blocks hold what
        was planned. What its tier's thread does not come to in time is given up. What was planned
        before and after these blocks is not loaded.
        """
        with self._outbox:
            self._started.loads.start(load_id, device_blocks, skip)

    def drop(self, load_id: str) -> None:
        """Nobody wants the load any more: planned, running or not. Its blocks come back."""
        with self._outbox:
            self._started.probes.forget(load_id)
            self._started.loads.drop(load_id)

    def offer(self, offers: Sequence[Offer], device_blocks: Sequence[int]) -> None:
        """Blocks that the device has computed or used again, in the order of their chain."""
        self._from_device(offers, device_blocks, self._started.manager.offer)

    def evicting(self, offers: Sequence[Offer], device_blocks: Sequence[int]) -> None:
        """Blocks that the device wants to reuse; it may once they are released."""
        self._from_device(offers, device_blocks, self._started.manager.device_evicting)

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Blocks that the device has computed or used again, and does not ``offer``: a count."""
        with self._outbox:
            self._started.manager.used(keys)

    def would_take(self, offers: Sequence[Offer]) -> set[BlockKey]:
        """Those that no tier has or gets, and that one would store now if they were evicted."""
        with self._outbox:
            return self._started.manager.would_take(offers)

    def poll(self) -> Polled:
        """What happened since the last call."""
        if self._running is not None:
            with self._outbox:
                self._running.loads.expire(time.monotonic())
        return self._outbox.take()

    @property
    def takes_computed(self) -> bool:
        """Whether any tier takes blocks as soon as they are computed, by ``offer``."""
        return any(setup.write == "through" for setup in self._setups)

    @property
    def takes_evicted(self) -> bool:
        """Whether the first tier that is written to takes what the device is about to forget."""
        writes = (setup.write for setup in self._setups if setup.write != "never")
        return next(writes, "never") == "on_evict"

    @property
    def tiers(self) -> tuple[TierSetup, ...]:
        """What the tiers were made from, fastest first."""
        return self._setups

    def on_tier(self, tier: int, urgency: JobUrgency, job: Job) -> None:
        """Do something on a tier's own thread."""
        self._threads[tier].submit(urgency, job)

    def evict(
        self,
        keys: Iterable[BlockKey] | None = None,
        tier: str | None = None,
        reason: str = "asked",
    ) -> None:
        """Remove blocks from one tier or all; None: every block. ``reason`` names the counter."""
        number = None if tier is None else [setup.name for setup in self._setups].index(tier)
        with self._outbox:
            manager = self._started.manager
            now_s = time.monotonic()
            self._carry_out(manager.evict(now_s, keys=keys, tier=number, reason=reason))

    def why(self, keys: Sequence[BlockKey], first: int = 0) -> list[BlockWhy]:
        """For each block of a prompt: where it lies, and whether it would be reused."""
        with self._outbox:
            return self._started.manager.why(keys, time.monotonic(), first)

    def statistics(self) -> KvStatistics:
        """Everything there is to count."""
        with self._outbox:
            return self._started.manager.statistics()

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not balance."""
        with self._outbox:
            self._started.manager.check_integrity()

    @property
    def idle(self) -> bool:
        """Whether nothing is being loaded or stored."""
        with self._outbox:
            statistics = self._started.manager.statistics()
            return not (statistics.loads_running or statistics.stores_running)

    def close(self, timeout_s: float = 10.0) -> None:
        """Give up what runs and close the tiers."""
        with self._outbox:
            if self._running is not None:
                self._running.loads.drop_all()
        if self._lending is not None:
            self._lending[0].close()
        for thread in self._threads:
            thread.stop()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.1, deadline_s - time.monotonic()))

    # What follows is called with the lock held, or takes it on a tier's thread.

    @property
    def _started(self) -> _Running:
        assert self._running is not None, "start() comes first"
        return self._running

    def _from_device(
        self,
        offers: Sequence[Offer],
        device_blocks: Sequence[int],
        tell: Callable[[Sequence[Offer], float], list[Action]],
    ) -> None:
        with self._outbox:
            for offer, block in zip(offers, device_blocks, strict=True):
                self._sources.setdefault(offer.key, []).append(block)
            self._carry_out(tell(offers, time.monotonic()))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Announce():
                    self._outbox.events(announced(action, self._block_size))
                case ReleaseSource():
                    self._outbox.released([self._released(key) for key in action.keys])
                case FreeBlocks():
                    job = free_job(action.keys, makes_room=action.makes_room)
                    self._threads[action.tier].submit(JobUrgency.FREE, job)
                case StoreBlocks():
                    self._store(action)

    def _released(self, key: BlockKey) -> int:
        blocks = self._sources[key]
        block = blocks.pop()
        if not blocks:
            del self._sources[key]
        return block

    def _store(self, action: StoreBlocks) -> None:
        setup, thread = self._setups[action.target], self._threads[action.target]
        done = partial(self._stored, action.move_id)
        urgency = _URGENCY[action.priority]
        if action.source == DEVICE:
            sources = [self._arena.span(self._sources[offer.key][-1]) for offer in action.offers]
            job = store_job(
                action.offers,
                sources,
                timeout_s=setup.store_timeout_s,
                from_engine=True,
                done=done,
            )
            thread.submit(urgency, job)
            return
        TierMove(
            action.offers,
            self._threads[action.source],
            thread,
            self._scratch,
            load_timeout_s=self._setups[action.source].load_timeout_s,
            store_timeout_s=setup.store_timeout_s,
            urgency=urgency,
            done=done,
        ).start()

    def _stored(self, move_id: int, stored: list[Stored], failed: dict[BlockKey, str]) -> None:
        with self._outbox:
            now_s = time.monotonic()
            self._carry_out(self._started.manager.finish_store(move_id, stored, failed, now_s))

    def _found(self, tier: int, blocks: Sequence[Stored]) -> None:
        self._carry_out(self._started.manager.found(tier, blocks, time.monotonic()))

    def _opened(self, tier: int, blocks: Sequence[Stored]) -> None:
        with self._outbox:
            if self._running is None:
                self._recovered[tier] = blocks
            else:
                manager, capacity = self._running.manager, self._setups[tier].capacity
                self._carry_out(manager.opened(tier, capacity, blocks, time.monotonic()))

    def _tier_up(self, tier: int) -> None:
        with self._outbox:
            if self._running is not None:
                self._carry_out(self._running.manager.tier_up(tier, time.monotonic()))

    def _tier_down(self, tier: int, reason: str) -> None:
        log.warning("tier %s is left alone for a while: %s", self._setups[tier].name, reason)
        with self._outbox:
            if self._running is not None:
                self._carry_out(self._running.manager.tier_down(tier, time.monotonic()))

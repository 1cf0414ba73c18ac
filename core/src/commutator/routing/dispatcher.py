"""Sends each request to the worker that the policy picks, and follows it to its end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence

from attrs import frozen

from commutator.config.model import Config, EngineConfig, RouterConfig
from commutator.errors import RoutingError
from commutator.plugins import PluginHost
from commutator.routing.cache_view import CacheView
from commutator.routing.contract import candidate_id
from commutator.routing.dispatch import Dispatch, Surroundings
from commutator.routing.event_health import EventWarning
from commutator.routing.kv_poll import KvPoll
from commutator.routing.load import InFlightLoad
from commutator.routing.moves import DispatchLimits, MigrationObserver
from commutator.routing.placer import Placed, Placer
from commutator.routing.pool import ModelPool
from commutator.routing.view import LiveWorker, WorkerView
from commutator.types import GenerateRequest, RequestSummary, WorkerRecord

__all__ = ["Dispatcher", "WorkerStatus"]

log = logging.getLogger(__name__)

_LOOPBACK = {"127.0.0.1", "localhost", "[::1]"}


@frozen
class WorkerStatus:
    """One line of ``/health``."""

    worker_id: str
    model: str
    kind: str
    state: str
    """ "ready", "draining" or "unreachable"."""
    active_requests: int
    """From this front door."""
    active_requests_of_all: int
    """From every front door that tells this one of its load."""
    admin_address: str | None = None
    """Where `commutator kv` asks it; None when that is not on this machine, or nowhere."""


class Dispatcher:
    """Routing for every model of one front-door process. Used from one event loop."""

    def __init__(self, config: Config, host: PluginHost, rng: random.Random | None = None) -> None:
        self._host = host
        self._engines: dict[str, EngineConfig] = {e.name or e.kind: e for e in config.engines}
        self._view = WorkerView(on_routable=self._wake)
        self.kv = KvPoll(self._view)
        busy = config.router.busy
        self.load = InFlightLoad(on_fall=self._wake if busy.enabled else None)
        rng = rng or random.Random()  # noqa: S311 - balances load, guards nothing
        self._pools = {model.name: self._pool(config.router, rng) for model in config.models}
        self._placers = {
            model: Placer(model, pool, self._view, self.load, busy, self._waits)
            for model, pool in self._pools.items()
        }
        self._migration = config.migration
        self._when_waiting: Callable[[int], None] | None = None
        self._migrations: MigrationObserver | None = None

    def _pool(self, config: RouterConfig, rng: random.Random) -> ModelPool[CacheView]:
        policy = self._host.routers.kinds[config.kind].thing(config)
        cache = CacheView(config) if policy.uses_overlap else None
        return ModelPool(policy, cache, self.load, rng, config.block_size)

    def watch_waiting(self, heard: Callable[[int], None]) -> None:
        """``heard`` gets 1 when a request begins to wait for a worker, -1 when that ends."""
        self._when_waiting = heard

    def watch_migrations(self, observer: MigrationObserver) -> None:
        """``observer`` is told of every request that changes its worker."""
        self._migrations = observer

    def waiting(self, model: str) -> int:
        """Requests that wait because every worker is busy."""
        return self._placers[model].waiting

    def load_peers(self) -> int:
        """How many other front doors tell this one of their load."""
        return self.load.peers

    def models(self) -> Sequence[str]:
        """Every model of the configuration, whether or not a worker is up for it."""
        return list(self._pools)

    def indexed_blocks(self) -> dict[str, int]:
        """By model: distinct KV blocks that some worker is known to hold."""
        return {
            model: pool.cache.index.statistics().blocks
            for model, pool in self._pools.items()
            if pool.cache is not None
        }

    def warnings(self) -> list[EventWarning]:
        """Why routing may work on a wrong view of what some worker holds."""
        caches = [pool.cache for pool in self._pools.values() if pool.cache is not None]
        return [warning for cache in caches for warning in cache.warnings()]

    def status(self) -> list[WorkerStatus]:
        """Every known worker, ordered by id."""
        return [
            WorkerStatus(
                worker.record.worker_id,
                worker.record.model,
                worker.record.kind,
                _state(worker),
                sum(
                    self.load.own(candidate_id(worker.record, rank)).active_requests
                    for rank in range(worker.record.info.data_parallel_size)
                ),
                sum(
                    self.load.of(candidate_id(worker.record, rank)).active_requests
                    for rank in range(worker.record.info.data_parallel_size)
                ),
                _local(worker.client.admin_address),
            )
            for worker in self._view.all()
        ]

    def ready(self) -> bool:
        """Whether every model has a worker that can be routed to."""
        return all(self._view.routable(model) for model in self._pools)

    def max_model_len(self, model: str) -> int | None:
        """What every routable worker can hold, prompt plus answer in tokens; None without any."""
        workers = self._view.routable(model)
        return min((worker.record.info.max_model_len for worker in workers), default=None)

    def hashed_block_size(self, model: str) -> int | None:
        """Tokens in a block of the sequence hashes to give to ``dispatch``; None: none needed."""
        cache = self._cache(model)
        return None if cache is None else cache.index.block_size

    async def worker_up(self, record: WorkerRecord) -> None:
        """The registry has a new worker, or a change of a known one."""
        known = self._view.get(record.worker_id)
        if known is not None and known.record.address == record.address and known.announced:
            self._set_draining(known, record.draining)
            return
        config = self._engines.get(record.engine)
        if config is None:
            log.error("worker %s names engine %s, which is not configured here; ignored",
                      record.worker_id, record.engine)  # fmt: skip
            return
        connector = self._host.engines.kinds[config.kind].thing
        worker = await self._view.put(record, connector.connect(config, record.address))
        if (cache := self._cache(record.model)) is not None:
            await cache.add(record)
        worker.announced = True
        if not record.draining:
            self._host.worker_up(record)

    def _set_draining(self, worker: LiveWorker, draining: bool) -> None:
        if worker.record.draining == draining:
            return
        self._view.set_draining(worker.record.worker_id, draining)
        if draining:
            self._host.worker_down(worker.record, "draining")
        else:
            self._host.worker_up(worker.record)

    async def worker_down(self, worker_id: str, reason: str) -> None:
        """The registry lost a worker; its running requests go elsewhere, or fail, at once."""
        worker = await self._view.remove(worker_id, reason)
        if worker is not None:
            pool = self._pools.get(worker.record.model)
            if pool is not None:
                pool.policy.forget(worker_id)
            if (cache := self._cache(worker.record.model)) is not None:
                await cache.remove(worker_id)
            if not worker.record.draining:  # otherwise it left routing before
                self._host.worker_down(worker.record, reason)

    async def dispatch(
        self,
        model: str,
        request: GenerateRequest,
        session_id: str | None = None,
        sequence_hashes: Sequence[int] | None = None,
        *,
        may_wait: bool = True,
        migration_limit: int | None = None,
        deadline_s: float | None = None,
    ) -> Dispatch:
        """Pick a worker and send the request; the tokens come from the result.

        ``sequence_hashes`` are those of the prompt's full blocks for the request's adapter, if
        they were made already; see ``hashed_block_size``. While every worker is busy the request
        waits, unless it may not; see ``Placer.place``, also for the errors. ``migration_limit``
        lowers that of the configuration; after ``deadline_s``, by the event loop's clock, no other
        worker is tried.
        """
        summary = RequestSummary(
            request_id=request.request_id,
            model=model,
            prompt_tokens=len(request.token_ids),
            max_tokens=request.sampling.max_tokens,
            session_id=session_id,
            priority=request.priority,
        )
        self._host.request_received(summary)
        try:
            placed = await self._place(summary, request, sequence_hashes, may_wait)
        except (RoutingError, asyncio.CancelledError) as error:
            self._host.request_failed(summary, error)
            raise
        self._host.request_routed(summary, placed.route.decision)
        around = Surroundings(
            self._cache(model),
            self._view,
            self.load,
            self._host,
            self._place_again,
            self._migrations,
        )
        most = self._migration.limit
        limit = most if migration_limit is None else min(most, migration_limit)
        limits = DispatchLimits(limit, self._migration.wait_s, deadline_s)
        return Dispatch(summary, request, placed, around, limits)

    async def _place(
        self,
        summary: RequestSummary,
        request: GenerateRequest,
        known: Sequence[int] | None,
        may_wait: bool,
    ) -> Placed:
        hashes = self._pools[summary.model].hashes(request) if known is None else known
        return await self._placers[summary.model].place(summary, hashes, may_wait=may_wait)

    async def _place_again(
        self, summary: RequestSummary, request: GenerateRequest, avoid: Collection[LiveWorker]
    ) -> Placed:
        """A worker that is not among ``avoid`` and can go on with the answer. Does not wait."""
        begun = request.generated_prefix > 0

        def usable(worker: LiveWorker) -> bool:
            return worker not in avoid and (worker.record.info.continues_answers or not begun)

        hashes = self._pools[summary.model].hashes(request)
        placer = self._placers[summary.model]
        return await placer.place(summary, hashes, may_wait=False, usable=usable)

    def _wake(self) -> None:
        for placer in self._placers.values():
            placer.wake()

    def _waits(self, change: int) -> None:
        if self._when_waiting is not None:
            self._when_waiting(change)

    async def close(self) -> None:
        """Abort what runs and disconnect from every worker."""
        await self._view.close()
        for pool in self._pools.values():
            if pool.cache is not None:
                await pool.cache.close()

    def _cache(self, model: str) -> CacheView | None:
        pool = self._pools.get(model)
        return pool.cache if pool is not None else None


def _local(address: str | None) -> str | None:
    """The address, if it is this machine's own: others are nobody's business."""
    host = (address or "").rpartition(":")[0]
    return address if host in _LOOPBACK else None


def _state(worker: LiveWorker) -> str:
    if worker.record.draining:
        return "draining"
    return "ready" if worker.connected else "unreachable"

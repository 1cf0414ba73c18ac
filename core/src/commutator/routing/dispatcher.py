"""Sends each request to the worker that the policy picks, and follows it to its end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence

from attrs import frozen

from commutator.config.model import Config, DisaggregationConfig, EngineConfig, RouterConfig
from commutator.errors import RoutingError
from commutator.plugins import PluginHost
from commutator.routing.cache_view import CacheView
from commutator.routing.contract import candidate_id
from commutator.routing.disagg_asker import DisaggAsker
from commutator.routing.dispatch import Dispatch, Surroundings
from commutator.routing.event_health import EventWarning
from commutator.routing.event_subscriber import WorkerEvents
from commutator.routing.forward import Forward, begin_forward
from commutator.routing.handover_observer import HandoverObserver
from commutator.routing.handover_pairs import HandoverPairs, RefusedPair
from commutator.routing.handover_poll import HandoverPoll
from commutator.routing.kv_poll import KvPoll
from commutator.routing.load import InFlightLoad
from commutator.routing.moves import DispatchLimits, MigrationObserver
from commutator.routing.placer import Placed, Placer
from commutator.routing.pool import ModelPool
from commutator.routing.prefill_pool import PrefillPool, QueueState
from commutator.routing.view import LiveWorker, WorkerView
from commutator.types import GenerateRequest, RequestSummary, Role, WorkerRecord

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
    role: Role = Role.BOTH
    hands_over: bool = False
    """Whether its prefill and decode can be apart, so that it can have another role."""


class Dispatcher:
    """Routing for every model of one front-door process. Used from one event loop."""

    def __init__(self, config: Config, host: PluginHost, rng: random.Random | None = None) -> None:
        self._host = host
        self._engines: dict[str, EngineConfig] = {e.name or e.kind: e for e in config.engines}
        self._view = WorkerView(on_routable=self._wake)
        self.kv = KvPoll(self._view)
        self.handovers = HandoverPoll(self._view)
        busy = config.router.busy
        apart = config.disaggregation
        queues = busy.enabled or (apart is not None and apart.router.busy.enabled)
        self.load = InFlightLoad(on_fall=self._wake if queues else None)
        rng = rng or random.Random()  # noqa: S311 - balances load, guards nothing
        self._pools = {model.name: self._pool(config.router, rng) for model in config.models}
        self._placers = {
            model: Placer(model, pool, self._view, self.load, busy, self._waits)
            for model, pool in self._pools.items()
        }
        self._pairs = HandoverPairs(self._engines, host)
        self._prefill_pools = (
            {model.name: self._prefill_pool(model.name, apart, rng) for model in config.models}
            if apart is not None
            else {}
        )
        self._migration = config.migration
        self._when_waiting: Callable[[int], None] | None = None
        self._migrations: MigrationObserver | None = None
        self._around: dict[str, Surroundings] = {}

    def _pool(
        self, config: RouterConfig, rng: random.Random, shared: CacheView | None = None
    ) -> ModelPool[CacheView]:
        """``shared``: another pool's view of the same workers' caches, used if it serves."""
        policy = self._host.routers.kinds[config.kind].thing(config)
        cache = None
        if policy.uses_overlap:
            cache = shared if shared and shared.serves(config) else CacheView(config)
        return ModelPool(policy, cache, self.load, rng, config.block_size)

    def _prefill_pool(
        self, model: str, config: DisaggregationConfig, rng: random.Random
    ) -> PrefillPool:
        pool = self._pool(config.router, rng, shared=self._pools[model].cache)
        busy, view, load = config.router.busy, self._view, self.load
        placer = Placer(model, pool, view, load, busy, self._waits, prefill=True)
        asker = DisaggAsker(self._host.disaggs.kinds[config.kind].thing(config))
        return PrefillPool(model, config, asker, pool, placer, view, load, self._pairs)

    def watch_waiting(self, heard: Callable[[int], None]) -> None:
        """``heard`` gets 1 when a request begins to wait for a worker, -1 when that ends."""
        self._when_waiting = heard

    def watch_migrations(self, observer: MigrationObserver) -> None:
        """``observer`` is told of every request that changes its worker."""
        self._migrations = observer
        self._around.clear()

    def watch_handovers(self, observer: HandoverObserver) -> None:
        """``observer`` is told of every request whose prefill may be elsewhere."""
        for pool in self._prefill_pools.values():
            pool.observer = observer

    def prefill_queues(self) -> dict[str, QueueState]:
        """By model: requests that wait for a prefill worker. Empty without `disaggregation`."""
        return {model: pool.queue() for model, pool in self._prefill_pools.items()}

    def refused_handovers(self) -> list[RefusedPair]:
        """Prefill workers whose KV some other worker cannot take."""
        return self._pairs.refused(worker.record for worker in self._view.all())

    def waiting(self, model: str) -> int:
        """Requests that wait because every worker is busy."""
        return self._placers[model].waiting

    def load_peers(self) -> int:
        """How many other front doors tell this one of their load."""
        return self.load.peers

    def models(self) -> Sequence[str]:
        """Every model of the configuration, whether or not a worker is up for it."""
        return list(self._pools)

    def cache_views(self) -> dict[str, CacheView]:
        """Each view once; front doors with equal configurations name them alike."""
        return {
            f"{model}/{number}": cache
            for model in self._pools
            for number, cache in enumerate(self._caches(model))
        }

    def indexed_blocks(self) -> dict[str, int]:
        """By model: distinct KV blocks that some worker is known to hold."""
        return {
            model: pool.cache.index.statistics().blocks
            for model, pool in self._pools.items()
            if pool.cache is not None
        }

    def worker_events(self) -> dict[str, WorkerEvents]:
        """By worker: what came of its KV events, for the first router that looks at overlaps."""
        found: dict[str, WorkerEvents] = {}
        for model in self._pools:
            for cache in self._caches(model)[:1]:
                found |= cache.statistics()
        return found

    def warnings(self) -> list[EventWarning]:
        """Why routing may work on a wrong view of what some worker holds."""
        caches = (cache for model in self._pools for cache in self._caches(model))
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
                worker.record.role,
                worker.record.info.handover is not None,
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
            self._change(known, record)
            return
        config = self._engines.get(record.engine)
        if config is None:
            log.error("worker %s names engine %s, which is not configured here; ignored",
                      record.worker_id, record.engine)  # fmt: skip
            return
        connector = self._host.engines.kinds[config.kind].thing
        worker = await self._view.put(record, connector.connect(config, record.address))
        for cache in self._caches(record.model):
            await cache.add(record)
        worker.announced = True
        self._tell_refusals(record.worker_id)
        if not record.draining:
            self._host.worker_up(record)

    def _change(self, worker: LiveWorker, record: WorkerRecord) -> None:
        known = worker.record
        if (known.draining, known.role) == (record.draining, record.role):
            return
        self._view.change(worker, draining=record.draining, role=record.role)
        if known.role is not record.role:
            self._forget(known)
            self._tell_refusals(record.worker_id)
        if known.draining and not record.draining:
            self._host.worker_up(worker.record)
        elif record.draining and not known.draining:
            self._host.worker_down(worker.record, "draining")

    def _tell_refusals(self, worker_id: str) -> None:
        for pair in self.refused_handovers():
            if worker_id in {pair.prefill_worker, pair.decode_worker}:
                log.warning("%s", pair)

    def _forget(self, record: WorkerRecord) -> None:
        """The policies keep nothing of the worker."""
        apart = self._prefill_pools.get(record.model)
        for pool in (self._pools.get(record.model), apart.pool if apart is not None else None):
            if pool is not None:
                pool.policy.forget(record.worker_id)

    async def worker_down(self, worker_id: str, reason: str) -> None:
        """The registry lost a worker; its running requests go elsewhere, or fail, at once."""
        worker = await self._view.remove(worker_id, reason)
        if worker is not None:
            self._forget(worker.record)
            for cache in self._caches(worker.record.model):
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
        summary = _summary(model, request, session_id)
        self._host.request_received(summary)
        try:
            placed = await self._place(summary, request, sequence_hashes, may_wait)
        except (RoutingError, asyncio.CancelledError) as error:
            self._host.request_failed(summary, error)
            raise
        self._host.request_routed(summary, placed.route.decision)
        most = self._migration.limit
        limit = most if migration_limit is None else min(most, migration_limit)
        limits = DispatchLimits(limit, self._migration.wait_s, deadline_s)
        return Dispatch(summary, request, placed, self._surroundings(model), limits)

    def _surroundings(self, model: str) -> Surroundings:
        """The same for all requests."""
        known = self._around.get(model)
        if known is None:
            apart = self._prefill_pools.get(model)
            known = self._around[model] = Surroundings(
                self._cache(model),
                self._view,
                self.load,
                self._host,
                self._place_again,
                self._migrations,
                None if apart is None else apart.decide,
            )
        return known

    def forwards(self, model: str) -> bool:
        """Whether some worker takes requests for this model as clients send them."""
        return any(w.record.info.forwards for w in self._view.routable(model))

    async def forward(
        self, model: str, request: GenerateRequest, session_id: str | None = None
    ) -> Forward:
        """Pick a worker for a request that it is to get as the client sent it.

        ``request`` has the prompt's tokens, as far as they are known, to route by. Raises as
        ``dispatch`` does.
        """
        summary, pool = _summary(model, request, session_id), self._pools[model]
        placer, hashes = self._placers[model], pool.hashes(request)
        return await begin_forward(summary, hashes, placer, self._view, self.load, self._host)

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
        for pool in self._prefill_pools.values():
            pool.placer.wake()

    def _waits(self, change: int) -> None:
        if self._when_waiting is not None:
            self._when_waiting(change)

    async def close(self) -> None:
        """Abort what runs and disconnect from every worker."""
        await self._view.close()
        for model in self._pools:
            for cache in self._caches(model):
                await cache.close()

    def _cache(self, model: str) -> CacheView | None:
        pool = self._pools.get(model)
        return pool.cache if pool is not None else None

    def _caches(self, model: str) -> list[CacheView]:
        """Each view once of what the model's workers hold; every worker is in all of them."""
        apart = self._prefill_pools.get(model)
        caches = (self._cache(model), apart.pool.cache if apart is not None else None)
        return list(dict.fromkeys(cache for cache in caches if cache is not None))


def _summary(model: str, request: GenerateRequest, session_id: str | None) -> RequestSummary:
    return RequestSummary(
        request_id=request.request_id,
        model=model,
        prompt_tokens=len(request.token_ids),
        max_tokens=request.sampling.max_tokens,
        session_id=session_id,
        priority=request.priority,
    )


def _local(address: str | None) -> str | None:
    """The address, if it is this machine's own: others are nobody's business."""
    host = (address or "").rpartition(":")[0]
    return address if host in _LOOPBACK else None


def _state(worker: LiveWorker) -> str:
    if worker.record.draining:
        return "draining"
    return "ready" if worker.connected else "unreachable"

"""Sends each request to the worker that the policy picks, and follows it to its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence

from commutator.config.model import Config
from commutator.errors import RoutingError
from commutator.plugins import PluginHost
from commutator.routing.cache_view import CacheView
from commutator.routing.dispatch import Dispatch, Surroundings
from commutator.routing.event_health import EventWarning
from commutator.routing.event_subscriber import WorkerEvents
from commutator.routing.forward import Forward, begin_forward
from commutator.routing.handover_observer import HandoverObserver
from commutator.routing.handover_pairs import HandoverPairs, RefusedPair
from commutator.routing.handover_poll import HandoverPoll
from commutator.routing.kv_poll import KvPoll
from commutator.routing.load import InFlightLoad
from commutator.routing.membership import Membership
from commutator.routing.model_workers import ModelWorkersFactory
from commutator.routing.moves import DispatchLimits, MigrationObserver
from commutator.routing.placer import Placed
from commutator.routing.prefill_pool import QueueState
from commutator.routing.view import LiveWorker, WorkerView
from commutator.routing.worker_status import WorkerStatus, worker_status
from commutator.types import GenerateRequest, RequestSummary, WorkerRecord

__all__ = ["Dispatcher"]


class Dispatcher:
    """Routing for every model of one front-door process. Used from one event loop."""

    def __init__(self, config: Config, host: PluginHost, rng: random.Random | None = None) -> None:
        self._host = host
        self._view = WorkerView(on_routable=self._wake)
        self.kv = KvPoll(self._view)
        self.handovers = HandoverPoll(self._view)
        apart = config.disaggregation
        queues = config.router.busy.enabled or (apart is not None and apart.router.busy.enabled)
        self.load = InFlightLoad(on_fall=self._wake if queues else None)
        engines = {engine.name or engine.kind: engine for engine in config.engines}
        pairs = HandoverPairs(engines, host)
        rng = rng or random.Random()  # noqa: S311 - balances load, guards nothing
        workers_of = ModelWorkersFactory(
            config, host, self._view, self.load, pairs, rng, self._waits
        )
        self._models = {model.name: workers_of.make(model.name) for model in config.models}
        self._membership = Membership(engines, self._models, self._view, pairs, host)
        self._migration = config.migration
        self._when_waiting: Callable[[int], None] | None = None
        self._migrations: MigrationObserver | None = None
        self._around: dict[str, Surroundings] = {}

    def watch_waiting(self, heard: Callable[[int], None]) -> None:
        """``heard`` gets 1 when a request begins to wait for a worker, -1 when that ends."""
        self._when_waiting = heard

    def watch_migrations(self, observer: MigrationObserver) -> None:
        """``observer`` is told of every request that changes its worker."""
        self._migrations = observer
        self._around.clear()

    def watch_handovers(self, observer: HandoverObserver) -> None:
        """``observer`` is told of every request whose prefill may be elsewhere."""
        for model in self._models.values():
            if model.prefill is not None:
                model.prefill.observer = observer

    def prefill_queues(self) -> dict[str, QueueState]:
        """By model: requests that wait for a prefill worker. Empty without `disaggregation`."""
        return {
            name: model.prefill.queue()
            for name, model in self._models.items()
            if model.prefill is not None
        }

    def refused_handovers(self) -> list[RefusedPair]:
        """Prefill workers whose KV some other worker cannot take."""
        return self._membership.refused_handovers()

    def waiting(self, model: str) -> int:
        """Requests that wait because every worker is busy."""
        return self._models[model].placer.waiting

    def load_peers(self) -> int:
        """How many other front doors tell this one of their load."""
        return self.load.peers

    def models(self) -> Sequence[str]:
        """Every model of the configuration, whether or not a worker is up for it."""
        return list(self._models)

    def cache_views(self) -> dict[str, CacheView]:
        """Each view once; front doors with equal configurations name them alike."""
        return {
            f"{name}/{number}": cache
            for name, model in self._models.items()
            for number, cache in enumerate(model.caches())
        }

    def indexed_blocks(self) -> dict[str, int]:
        """By model: distinct KV blocks that some worker is known to hold."""
        return {
            name: model.cache.index.statistics().blocks
            for name, model in self._models.items()
            if model.cache is not None
        }

    def worker_events(self) -> dict[str, WorkerEvents]:
        """By worker: what came of its KV events, for the first router that looks at overlaps."""
        found: dict[str, WorkerEvents] = {}
        for model in self._models.values():
            for cache in model.caches()[:1]:
                found |= cache.statistics()
        return found

    def warnings(self) -> list[EventWarning]:
        """Why routing may work on a wrong view of what some worker holds."""
        caches = (cache for model in self._models.values() for cache in model.caches())
        return [warning for cache in caches for warning in cache.warnings()]

    def status(self) -> list[WorkerStatus]:
        """Every known worker, ordered by id."""
        return [worker_status(worker, self.load) for worker in self._view.all()]

    def ready(self) -> bool:
        """Whether every model has workers that can be routed to and compute prompts."""
        return all(map(self._serves, self._models))

    def _serves(self, model: str) -> bool:
        workers = self._view.routable(model)
        if any(worker.record.info.computes_prompts for worker in workers):
            return True
        return bool(workers and self._view.routable(model, prefill=True))

    def max_model_len(self, model: str) -> int | None:
        """What every routable worker can hold, prompt plus answer in tokens; None without any."""
        workers = self._view.routable(model)
        return min((worker.record.info.max_model_len for worker in workers), default=None)

    def hashed_block_size(self, model: str) -> int | None:
        """Tokens in a block of the sequence hashes to give to ``dispatch``; None: none needed."""
        known = self._models.get(model)
        cache = None if known is None else known.cache
        return None if cache is None else cache.index.block_size

    async def worker_up(self, record: WorkerRecord) -> None:
        """The registry has a new worker, or a change of a known one."""
        await self._membership.worker_up(record)

    async def worker_down(self, worker_id: str, reason: str) -> None:
        """The registry lost a worker; its running requests go elsewhere, or fail, at once."""
        await self._membership.worker_down(worker_id, reason)

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
            workers = self._models[model]
            known = self._around[model] = Surroundings(
                workers.cache,
                self._view,
                self.load,
                self._host,
                self._place_again,
                self._migrations,
                None if workers.prefill is None else workers.prefill.decide,
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
        summary, workers = _summary(model, request, session_id), self._models[model]
        hashes = workers.pool.hashes(request)
        return await begin_forward(summary, hashes, workers.placer, self._surroundings(model))

    async def _place(
        self,
        summary: RequestSummary,
        request: GenerateRequest,
        known: Sequence[int] | None,
        may_wait: bool,
    ) -> Placed:
        workers = self._models[summary.model]
        hashes = workers.pool.hashes(request) if known is None else known
        return await workers.placer.place(summary, hashes, request, may_wait=may_wait)

    async def _place_again(
        self, summary: RequestSummary, request: GenerateRequest, avoid: Collection[LiveWorker]
    ) -> Placed:
        """A worker that is not among ``avoid`` and can go on with the answer. Does not wait."""
        begun = request.generated_prefix > 0

        def usable(worker: LiveWorker) -> bool:
            return worker not in avoid and (worker.record.info.continues_answers or not begun)

        workers = self._models[summary.model]
        hashes = workers.pool.hashes(request)
        return await workers.placer.place(summary, hashes, may_wait=False, usable=usable)

    def _wake(self) -> None:
        for model in self._models.values():
            model.wake()

    def _waits(self, change: int) -> None:
        if self._when_waiting is not None:
            self._when_waiting(change)

    async def close(self) -> None:
        """Abort what runs and disconnect from every worker."""
        await self._view.close()
        for model in self._models.values():
            for cache in model.caches():
                await cache.close()


def _summary(model: str, request: GenerateRequest, session_id: str | None) -> RequestSummary:
    return RequestSummary(
        request_id=request.request_id,
        model=model,
        prompt_tokens=len(request.token_ids),
        max_tokens=request.sampling.max_tokens,
        session_id=session_id,
        priority=request.priority,
    )

"""Routing for every model of one front door."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakSet

from commutator.config.model import Config
from commutator.contract.engine import EngineClient, EngineConfig
from commutator.contract.observer import Observer
from commutator.contract.request import UNKNOWN_CALLER, Caller, GenerateRequest, RequestSummary
from commutator.contract.tuning import Trial
from commutator.contract.worker import EngineInfo, EngineLoad
from commutator.errors import RoutingError
from commutator.plugins import PluginHost
from commutator.routing.disagg.prefill_pool import QueueState, WorkerCompatibility
from commutator.routing.dispatch import Dispatch, DispatchLimits
from commutator.routing.forward import Forward
from commutator.routing.load import InFlightLoad
from commutator.routing.membership import Membership
from commutator.routing.model import ModelRouting, model_routing, tune
from commutator.routing.placement import Placement, Usable, able
from commutator.routing.prefix_index.health import EventWarning
from commutator.routing.prefix_index.indexer import KvIndexer, WorkerEvents
from commutator.routing.workers import (
    LiveWorker,
    LiveWorkers,
    WorkerPoll,
    WorkerStatus,
    answers_of,
    worker_status,
)

_SLICE_WORKERS = 64

OnPlaced = Callable[[RequestSummary, Placement, bool], None]


class Dispatcher:
    """Sends each request to the worker that the model's policy picks. Used from one event loop."""

    def __init__(
        self,
        config: Config,
        host: PluginHost,
        rng: random.Random | None = None,
        on_waiting: Callable[[int], None] = lambda _: None,
        on_placed: OnPlaced | None = None,
        load: InFlightLoad | None = None,
    ) -> None:
        """``on_waiting`` is called with 1 when a request begins to wait for a worker, then -1.

        ``on_placed`` is called when a request has its first worker, with that, and whether a
        prefill worker computes its prompt. ``load``: empty; by default its own.
        """
        self._host = host
        self._on_placed = on_placed
        self._workers = LiveWorkers(on_routable=self._wake)
        self.poll = WorkerPoll(self._workers, tiers=bool(config.tiers))
        self._from_zero = config.scales_from_zero
        self.load = load or InFlightLoad()
        self.load.on_fall = self._wake if _queues(config) else None
        self._engines = _by_name(config)
        self._compatibility = WorkerCompatibility(self._engines, host)
        events = config.cluster.events
        self._bus = host.event_buses.kinds[events.kind].thing(events)
        self._routing = partial(
            model_routing,
            host=host,
            workers=self._workers,
            load=self.load,
            compatibility=self._compatibility,
            rng=rng or random.Random(),  # noqa: S311 - balances load, guards nothing
            on_waiting=on_waiting,
            bus=self._bus,
        )
        self._models = {model.name: self._routing(model.name, config) for model in config.models}
        self._arriving: set[str] = set()
        """Models that were added to a running front door, until they have had a worker."""
        self._replaced: WeakSet[ModelRouting] = WeakSet()
        """What requests that were placed by an earlier configuration still use."""
        self.membership = Membership(
            self._engines, self._models, self._workers, self._compatibility, host
        )
        self._config = config

    async def use(self, config: Config) -> None:
        """Route requests that come from now on as ``config`` says, which keeps the event bus.

        Those before end as they began. Models that it lacks stay until ``forget``. Raises what a
        policy raises that is made with it; then nothing has changed.
        """
        old = self._config
        same = (old.router, old.disaggregation) == (config.router, config.disaggregation)
        made = {
            name: self._routing(name, config, kept=() if known is None else known.indexers())
            for name in (model.name for model in config.models)
            if (known := self._models.get(name)) is None or not same
        }
        indexers = {
            name: [one for one in routing.indexers() if one not in self._indexers_of(name)]
            for name, routing in made.items()
        }
        for name, fresh in indexers.items():
            for indexer in fresh:
                await indexer.follow(self._workers.of(name))
        self._arriving |= made.keys() - self._models.keys()
        unused = {one for name in made for one in self._indexers_of(name)}
        self._replaced |= {self._models[name] for name in made.keys() & self._models.keys()}
        self._models.update(made)
        self._engines.clear()
        self._engines.update(_by_name(config))
        self._compatibility.forget_styles()
        self.load.on_fall = self._wake if _queues(config) else None
        self.poll.tiers = bool(config.tiers)
        self._config = config
        for name, fresh in indexers.items():  # workers may have come and gone meanwhile
            for indexer in fresh:
                await indexer.follow(self._workers.of(name))
        for indexer in unused - {one for name in made for one in self._indexers_of(name)}:
            await indexer.close()
        await self.membership.look_again()
        self._wake()

    async def forget(self, model: str) -> None:
        """Drop a model that ``use`` was given no more, and of which no request is left."""
        if (routing := self._models.pop(model, None)) is not None:
            self._arriving.discard(model)
            for indexer in routing.indexers():
                await indexer.close()

    def _indexers_of(self, model: str) -> list[KvIndexer]:
        known = self._models.get(model)
        return [] if known is None else known.indexers()

    def tune(self, values: Mapping[str, float], trial: Trial | None) -> None:
        """Route by other values of tunable options, and by that of ``trial`` the requests it takes.

        See ``commutator.routing.model.tune``, also for the errors.
        """
        tune(
            chain.from_iterable(model.tuned for model in self._models.values()),
            self._config,
            values,
            trial,
        )

    def policy_problems(self) -> list[str]:
        """How the models' routing policies have failed in the last minutes."""
        return [text for one in self._models.values() if (text := one.router.problem())]

    def prefill_queues(self) -> dict[str, QueueState]:
        """Requests that wait for a prefill worker, by model. Empty without `disaggregation`."""
        return {
            name: model.prefill.queue()
            for name, model in self._models.items()
            if model.prefill is not None
        }

    def waiting(self, model: str) -> int:
        """Requests that wait because every worker of the model is busy."""
        return self._models[model].placer.waiting

    def indexers(self) -> dict[str, KvIndexer]:
        """Each indexer once, by a name that is equal in front doors of one configuration."""
        return {
            f"{name}/{number}": indexer
            for name, model in self._models.items()
            for number, indexer in enumerate(model.indexers())
        }

    def indexed_blocks(self) -> dict[str, int]:
        """Distinct KV blocks in the prefix index of each model."""
        return {
            name: model.indexer.index.statistics().blocks
            for name, model in self._models.items()
            if model.indexer is not None
        }

    def cached_blocks(self) -> dict[str, int]:
        """KV blocks that each worker caches, as far as its model's first index knows."""
        return {
            worker_id: sum(sizes)
            for model in self._models.values()
            for indexer in model.indexers()[:1]
            for worker_id, sizes in indexer.index.blocks_by_worker().items()
        }

    def worker_events(self) -> dict[str, WorkerEvents]:
        """Counts of each worker's KV events, from its model's first indexer."""
        found: dict[str, WorkerEvents] = {}
        for model in self._models.values():
            for indexer in model.indexers()[:1]:
                found |= indexer.statistics()
        return found

    def warnings(self) -> list[EventWarning]:
        """Why the prefix index may be wrong about a worker."""
        return [warning for indexer in self.indexers().values() for warning in indexer.warnings()]

    def reviewing(self) -> Iterator[list[EventWarning]]:
        """``warnings`` in slices, for loops that serve requests between."""
        for indexer in self.indexers().values():
            yield from indexer.reviewing()

    def status(self) -> list[WorkerStatus]:
        """Every known worker, ordered by id."""
        return [status for found in self.statuses() for status in found]

    def statuses(self) -> Iterator[list[WorkerStatus]]:
        """``status`` in slices, for loops that serve requests between."""
        workers = self._workers.all()
        for begin in range(0, len(workers), _SLICE_WORKERS):
            some = workers[begin : begin + _SLICE_WORKERS]
            yield [worker_status(worker, self.load) for worker in some]

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call the hooks of ``observer`` until the function that is returned is called, once."""
        self._host.add_observer(type(observer).__name__, observer)
        return partial(self._host.remove_observer, observer)

    async def engine_loads(
        self, worker_ids: Iterable[str], *, timeout_s: float
    ) -> dict[str, EngineLoad]:
        """What these workers count themselves, without those that do not answer in time."""

        async def load(client: EngineClient) -> EngineLoad:
            async with asyncio.timeout(timeout_s):
                return await client.load()

        known = [self._workers.get(worker_id) for worker_id in worker_ids]
        workers = [worker for worker in known if worker is not None and worker.connected]
        return await answers_of(workers, load)

    def ready(self) -> bool:
        """Whether every model has a routable worker, and one that computes prompts.

        Where a planner starts the first worker for a request that waits, none is needed.
        """
        return self._from_zero or all(self.models_ready().values())

    def models_ready(self) -> dict[str, bool]:
        """By model, whether it has a routable worker, and one that computes prompts.

        One that was added while this front door runs is not expected to before it has had one.
        """
        served = {model.name: self._serves(model.name) for model in self._config.models}
        self._arriving -= {model for model, serves in served.items() if serves}
        return {model: serves or model in self._arriving for model, serves in served.items()}

    def _serves(self, model: str) -> bool:
        workers = self._workers.routable(model)
        if any(worker.record.info.computes_prompts for worker in workers):
            return True
        return bool(workers and self._workers.routable(model, prefill=True))

    def max_model_len(self, model: str) -> int | None:
        """Prompt plus answer, in tokens, that every routable worker can hold; None without any."""
        return self._workers.max_model_len(model)

    def cached_block_size(self, model: str) -> int | None:
        """Tokens in the largest KV block of its routable workers; None: not all cache prefixes."""
        return self._workers.cached_block_size(model)

    def hashed_block_size(self, model: str) -> int | None:
        """Tokens in a block of ``dispatch``'s sequence hashes; None: the model needs no hashes."""
        known = self._models.get(model)
        indexer = None if known is None else known.indexer
        return None if indexer is None else indexer.index.block_size

    async def dispatch(
        self,
        model: str,
        request: GenerateRequest,
        caller: Caller = UNKNOWN_CALLER,
        sequence_hashes: Sequence[int] | None = None,
        *,
        may_wait: bool = True,
        migration_limit: int | None = None,
        deadline_s: float | None = None,
    ) -> Dispatch:
        """Pick a worker and send the request; read the tokens from the result.

        ``sequence_hashes`` are those of the prompt's full blocks, if they are known already; see
        ``hashed_block_size``. While every worker is busy the request waits, unless ``may_wait`` is
        false; see ``Placer.place``, also for the errors. Only workers that can do what it asks get
        it: RequestError, before anything is routed, when no worker of the model can.
        ``migration_limit`` lowers that of the configuration; after ``deadline_s``, by the event
        loop's clock, no other worker is tried.
        """
        summary = _summary(model, request, caller)
        usable = None
        if not (request.is_plain and self._workers.all_generate(model)):
            usable = able(model, self._workers.routable(model), request)
            if request.adapter is not None or request.media:
                sequence_hashes = None  # those that are known are of the plain prompt
        placement = await self._place(
            summary, request, sequence_hashes, may_wait=may_wait, usable=usable
        )
        most = self._config.migration.limit
        limit = most if migration_limit is None else min(most, migration_limit)
        limits = DispatchLimits(limit, self._config.migration.wait_s, deadline_s)
        dispatch = Dispatch(summary, request, placement, self._models[model], limits)
        if self._on_placed is not None:
            self._on_placed(summary, placement, dispatch.separate)
        self._host.answer_begun(summary, dispatch)
        return dispatch

    def preview(self, model: str, request: GenerateRequest) -> dict[str, Any]:
        """What ``Dispatch.explain`` would say of ``request`` now; nothing is sent or counted.

        A policy that remembers what it chose remembers this, too. Raises RoutingError, or
        RequestError when no worker can do what the request asks.
        """
        routing, summary = self._models[model], _summary(model, request, UNKNOWN_CALLER)
        usable = able(model, self._workers.routable(model), request)
        placement = routing.placer.preview(summary, routing.router.hashes(request), usable)
        explained = placement.route.explain()
        if routing.prefill and (apart := routing.prefill.preview(summary, request, placement)):
            explained["disaggregation"] = apart.explain()
        return explained

    def infos(self, model: str) -> list[EngineInfo]:
        """What the workers that can take requests for this model say of themselves."""
        return [worker.record.info for worker in self._workers.routable(model)]

    def forwards(self, model: str) -> bool:
        """Whether a worker takes requests for this model as clients send them."""
        return any(map(_forwards, self._workers.routable(model)))

    async def forward(
        self,
        model: str,
        request: GenerateRequest,
        caller: Caller = UNKNOWN_CALLER,
        sequence_hashes: Sequence[int] | None = None,
        usable: Usable | None = None,
    ) -> Forward:
        """Pick a worker for a request that it gets as the client sent it.

        ``request`` holds the prompt's tokens, as far as they are known, to route by; ``usable``
        says which workers may get it, by default those that take any. Raises as ``dispatch`` does.
        """
        summary = _summary(model, request, caller)
        if sequence_hashes is None:
            sequence_hashes = self._models[model].router.hashes(request)
        placement = await self._place(summary, None, sequence_hashes, usable=usable or _forwards)
        if self._on_placed is not None:
            self._on_placed(summary, placement, False)
        return Forward(summary, placement, self._models[model])

    async def _place(
        self,
        summary: RequestSummary,
        request: GenerateRequest | None,
        hashes: Sequence[int] | None,
        *,
        may_wait: bool = True,
        usable: Usable | None = None,
    ) -> Placement:
        """Place a new request, with the hooks that belong to it. Raises as ``Placer.place``."""
        host, model = self._host, self._models[summary.model]
        if request is not None:
            host.prompt_received(summary, request)
        host.request_received(summary)
        try:
            if hashes is None:
                assert request is not None
                hashes = model.router.hashes(request)
            placement = await model.placer.place(
                summary, hashes, request, may_wait=may_wait, usable=usable
            )
        except (RoutingError, asyncio.CancelledError) as error:
            host.request_failed(summary, error, None)
            raise
        if waited_s := placement.route.waited_s:
            host.request_queued(summary, "router", waited_s)
        host.request_routed(summary, placement.route.decision)
        return placement

    def _wake(self) -> None:
        for model in (*self._replaced, *self._models.values()):
            model.wake()

    async def close(self) -> None:
        """Abort what runs and disconnect from every worker."""
        await self._workers.close()
        for indexer in self.indexers().values():
            await indexer.close()
        await self._bus.close()


def _by_name(config: Config) -> dict[str, EngineConfig]:
    return {engine.name or engine.kind: engine for engine in config.engines}


def _queues(config: Config) -> bool:
    """Whether requests may wait for a worker."""
    disagg = config.disaggregation
    busy = config.router.busy.enabled or (disagg is not None and disagg.router.busy.enabled)
    return busy or config.scales_from_zero


def _forwards(worker: LiveWorker) -> bool:
    return worker.record.info.forwards


def _summary(model: str, request: GenerateRequest, caller: Caller) -> RequestSummary:
    return RequestSummary(
        request_id=request.request_id,
        model=model,
        prompt_tokens=len(request.token_ids),
        max_tokens=request.sampling.max_tokens,
        priority=request.priority,
        user=caller.user,
        session_id=caller.session_id,
        principal=caller.principal,
        weight=caller.weight,
        headers=caller.headers,
    )

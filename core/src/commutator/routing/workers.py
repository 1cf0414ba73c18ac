"""The workers that this front door knows, their connections and their state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from attrs import define, evolve, frozen

from commutator.contract.capability import Operation
from commutator.contract.engine import EngineClient
from commutator.contract.registry import LAPSED
from commutator.contract.routing import ranks_of
from commutator.contract.worker import KvStatistics, Role, TransferStatistics, WorkerRecord
from commutator.errors import CommutatorError
from commutator.routing.load import InFlightLoad

log = logging.getLogger(__name__)

_RECONNECT_S = (0.05, 0.1, 0.2, 0.5, 1.0)

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 1.0
MAX_PROBE_FAILURES = 3
"""After as many probes in a row that fail, a worker whose lease lapsed has lost its requests."""

AnswerT = TypeVar("AnswerT")


@define(eq=False)
class LiveWorker:
    """A worker of ``LiveWorkers``. It gets requests while ``connected`` and not draining.

    Where no other can take them, it gets them also while it drains, until a worker that has just
    been announced is connected for the first time.
    """

    record: WorkerRecord
    client: EngineClient
    connected: bool = False
    ever_connected: bool = False
    failures: int = 0
    """Attempts to connect that failed since it was last connected."""
    reconnecting: asyncio.Task[None] | None = None
    gone: str | None = None
    """Why the worker was removed; None while it is registered."""
    requests: int = 0
    """Requests of this front door that it is answering."""
    announced: bool = False
    """The indexers and plugins know the worker; false if adding it was interrupted."""


class LiveWorkers:
    """One connected client for each worker in the registry."""

    def __init__(self, on_routable: Callable[[], None] = lambda: None) -> None:
        """``on_routable`` is called when a worker may have become able to take requests."""
        self._workers: dict[str, LiveWorker] = {}
        self._on_routable = on_routable
        self._finishing: dict[LiveWorker, asyncio.Task[None]] = {}
        # Both are asked for by each request, and change only with the workers.
        self._routable: dict[tuple[str, bool], tuple[LiveWorker, ...]] = {}
        self._max_model_len: dict[str, int | None] = {}
        self._generate: dict[str, bool] = {}
        self._cached_block_size: dict[str, int | None] = {}

    def get(self, worker_id: str) -> LiveWorker | None:
        return self._workers.get(worker_id)

    def all(self) -> list[LiveWorker]:
        return list(self._workers.values())

    def of(self, model: str) -> list[WorkerRecord]:
        """The announced workers of a model."""
        workers = self._workers.values()
        return [one.record for one in workers if one.announced and one.record.model == model]

    def routable(self, model: str, *, prefill: bool = False) -> Sequence[LiveWorker]:
        """Workers that can take a request for ``model``, ordered by worker id.

        ``prefill``: the workers with role ``prefill``; otherwise all others.
        """
        known = self._routable.get((model, prefill))
        if known is None:
            known = self._routable[model, prefill] = self._find_routable(model, prefill=prefill)
        return known

    def _find_routable(self, model: str, *, prefill: bool) -> tuple[LiveWorker, ...]:
        workers = [
            worker
            for worker in self._workers.values()
            if worker.record.model == model and (worker.record.role is Role.PREFILL) is prefill
        ]
        staying = [worker for worker in workers if not worker.record.draining]
        found = [worker for worker in staying if worker.connected]
        if not found and not all(worker.ever_connected for worker in staying):
            # The old worker was drained because the registry has the new one as ready. It serves
            # until this front door is connected to the new one.
            found = [worker for worker in workers if worker.connected]
        return tuple([worker for worker in found if worker.client.answers] or found)

    def max_model_len(self, model: str) -> int | None:
        """Prompt plus answer, in tokens, that every routable worker can hold; None without any."""
        if model not in self._max_model_len:
            lengths = (worker.record.info.max_model_len for worker in self.routable(model))
            self._max_model_len[model] = min(lengths, default=None)
        return self._max_model_len[model]

    def cached_block_size(self, model: str) -> int | None:
        """Tokens in the largest KV block of its routable workers; None: not all cache prefixes."""
        if model not in self._cached_block_size:
            infos = [worker.record.info for worker in self.routable(model)]
            all_cache = all(info.caches_prefixes for info in infos)
            sizes = (info.block_size for info in infos if all_cache)
            self._cached_block_size[model] = max(sizes, default=None)
        return self._cached_block_size[model]

    def all_generate(self, model: str) -> bool:
        """Whether every routable worker generates, as far as they say."""
        known = self._generate.get(model)
        if known is None:
            infos = (worker.record.info for worker in self.routable(model))
            known = self._generate[model] = all(Operation.GENERATE in i.operations for i in infos)
        return known

    def _routable_changed(self) -> None:
        self._changed()
        self._on_routable()

    def _changed(self) -> None:
        self._routable.clear()
        self._max_model_len.clear()
        self._generate.clear()
        self._cached_block_size.clear()

    async def put(self, record: WorkerRecord, client: EngineClient) -> LiveWorker:
        """Add a worker, or replace the one with the same id, and connect to it."""
        old = self._workers.pop(record.worker_id, None)
        worker = LiveWorker(record, client)
        self._workers[record.worker_id] = worker
        self._workers = dict(sorted(self._workers.items()))
        self._changed()
        if old is not None:
            await _dismiss(old, "replaced")
        client.watch_answers(self._routable_changed)
        await self._connect(worker)
        if not worker.connected:
            self.lost(worker)
        return worker

    def change(self, worker: LiveWorker, *, draining: bool, role: Role) -> None:
        """Apply a change in the registry to a known worker."""
        worker.record = evolve(worker.record, draining=draining, role=role)
        self._routable_changed()

    async def remove(self, worker_id: str, reason: str) -> LiveWorker | None:
        """Route nothing to a worker any more, and end its requests.

        One whose lease lapsed may be cut off from the registry alone: it finishes its requests, for
        as long as it answers.
        """
        worker = self._workers.pop(worker_id, None)
        self._changed()
        if worker is None:
            return None
        if reason == LAPSED and worker.requests:
            _end_routing(worker, reason)
            task = asyncio.create_task(_let_finish(worker))
            self._finishing[worker] = task
            task.add_done_callback(lambda _: self._finishing.pop(worker, None))
        else:
            await _dismiss(worker, reason)
        return worker

    def lost(self, worker: LiveWorker) -> None:
        """Stop routing to a worker whose connection failed, and reconnect in the background."""
        worker.connected = False
        self._changed()
        if worker.reconnecting is None and worker.gone is None:
            worker.reconnecting = asyncio.create_task(self._reconnect(worker))

    async def close(self) -> None:
        for worker_id in list(self._workers):
            await self.remove(worker_id, "the front door is shutting down")
        for worker, task in list(self._finishing.items()):
            task.cancel()
            await worker.client.close()

    async def _connect(self, worker: LiveWorker) -> None:
        try:
            info = await worker.client.start()
        except CommutatorError as error:
            # One that stays unreachable is tried every second.
            level = logging.DEBUG if worker.failures else logging.WARNING
            log.log(level, "worker %s: connecting failed: %s", worker.record.worker_id, error)
            worker.failures += 1
            return
        if worker.failures:
            log.info("worker %s: connected at last", worker.record.worker_id)
            worker.failures = 0
        worker.record = evolve(worker.record, info=info)
        worker.connected = worker.ever_connected = True
        self._routable_changed()

    async def _reconnect(self, worker: LiveWorker) -> None:
        attempt = 0
        while not worker.connected:
            await asyncio.sleep(_RECONNECT_S[min(attempt, len(_RECONNECT_S) - 1)])
            await self._connect(worker)
            attempt += 1
        worker.reconnecting = None


async def _dismiss(worker: LiveWorker, reason: str) -> None:
    _end_routing(worker, reason)
    await asyncio.shield(worker.client.close())  # also when a newer change cancels this one


def _end_routing(worker: LiveWorker, reason: str) -> None:
    worker.connected = False
    worker.gone = reason
    if worker.reconnecting is not None:
        worker.reconnecting.cancel()


async def _let_finish(worker: LiveWorker) -> None:
    """Close the client when no request is left, or when the worker does not answer."""
    failures = 0
    while worker.requests and failures < MAX_PROBE_FAILURES:
        failures = 0 if await _answers_probe(worker.client) else failures + 1
        await asyncio.sleep(PROBE_EVERY_S)
    if worker.requests:
        log.warning(
            "worker %s: its lease lapsed and it answers no probe; %d requests migrate or fail",
            worker.record.worker_id, worker.requests,
        )  # fmt: skip
    await worker.client.close()


async def _answers_probe(client: EngineClient) -> bool:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await client.load()
    except (CommutatorError, TimeoutError):
        return False
    return True


@frozen
class WorkerStatus:
    """One worker in ``/health``."""

    worker_id: str
    model: str
    kind: str
    state: str
    """ "ready", "draining" or "unreachable"."""
    active_requests: int
    """Requests in flight from this front door."""
    active_requests_of_all: int
    """Requests in flight from all front doors that share their load with this one."""
    admin_address: str | None = None
    """Where the worker answers questions about itself; None if it answers none."""
    role: Role = Role.BOTH
    hands_over: bool = False
    """The worker can hand KV over, so its role can be changed."""
    engine: str = ""
    """The name of its `engines` entry."""
    version: str = ""
    """The engine's version, for people."""
    pid: int | None = None
    """Process id on its own machine; None when not known."""
    host: str = ""
    """The name of the host that runs it; empty without one."""
    block_size: int = 0
    """Tokens in one of its KV blocks."""
    operations: tuple[str, ...] = ()
    """What it can be asked: generate, embed, ..."""


def worker_status(worker: LiveWorker, load: InFlightLoad) -> WorkerStatus:
    """The status of a worker, with its data-parallel ranks summed."""
    record = worker.record
    ranks = [name for _, name in ranks_of(record.worker_id, record.info.data_parallel_size)]
    return WorkerStatus(
        record.worker_id,
        record.model,
        record.kind,
        _state(worker),
        sum(load.own(rank).active_requests for rank in ranks),
        sum(load.of(rank).active_requests for rank in ranks),
        worker.client.admin_address,
        record.role,
        record.info.handover is not None,
        record.engine,
        record.info.version,
        record.info.pid,
        record.host,
        record.info.block_size,
        record.info.operations,
    )


def _state(worker: LiveWorker) -> str:
    if worker.record.draining:
        return "draining"
    return "ready" if worker.connected else "unreachable"


class WorkerPoll:
    """Fetches statistics of KV tiers and KV transfers from the connected workers at intervals."""

    def __init__(self, workers: LiveWorkers, *, tiers: bool, every_s: float = 2.0) -> None:
        """``tiers``: whether workers have KV tiers; without, their statistics are not fetched."""
        self.kv: dict[str, KvStatistics] = {}
        """The last tier statistics by worker id; connected workers with tiers only."""
        self.transfers: dict[str, TransferStatistics] = {}
        """The last transfer statistics by worker id; empty until a prefill worker has been up."""
        self.refused: dict[str, Mapping[str, int]] = {}
        """Connections that workers' processes refused, by service and worker id."""
        self._workers = workers
        self.tiers = tiers
        self._every_s = every_s
        self._disaggregated = False

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(self._every_s)

    async def ask(self) -> None:
        """Ask every worker once, all at the same time."""
        workers = self._workers.all()
        # Roles change but counters persist: after the first prefill worker this stays on.
        self._disaggregated |= any(worker.record.role is Role.PREFILL for worker in workers)
        connected = [worker for worker in workers if worker.connected]
        tiered = connected if self.tiers else ()
        handing = connected if self._disaggregated else ()
        limit_s = self._every_s
        self.kv, self.transfers, self.refused = await asyncio.gather(
            answers_of(tiered, lambda client: client.kv_statistics(timeout_s=limit_s)),
            answers_of(
                [worker for worker in handing if worker.record.info.handover],
                lambda client: client.handover_statistics(timeout_s=limit_s),
            ),
            answers_of(connected, lambda client: client.refused_connections(timeout_s=limit_s)),
        )


async def answers_of(
    workers: Sequence[LiveWorker], ask: Callable[[EngineClient], Awaitable[AnswerT | None]]
) -> dict[str, AnswerT]:
    """The answers by worker id, without workers that fail to answer or return None."""

    async def one(worker: LiveWorker) -> AnswerT | None:
        try:
            return await ask(worker.client)
        except Exception as error:  # noqa: BLE001 - clients of plugins may raise anything
            log.debug("worker %s: no answer: %r", worker.record.worker_id, error)
            return None

    answers = await asyncio.gather(*map(one, workers))
    return {
        worker.record.worker_id: answer
        for worker, answer in zip(workers, answers, strict=True)
        if answer is not None
    }

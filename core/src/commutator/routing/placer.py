"""Finds a worker for each request of one model: asks the policy, waits if it must, connects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from attrs import evolve, frozen

from commutator.config.model import BusyConfig
from commutator.errors import EngineUnavailableError, OverloadedError, RoutingError
from commutator.routing.admission import Admission
from commutator.routing.ahead import Ahead
from commutator.routing.busy import describe_busy
from commutator.routing.load import InFlightLoad, Ticket
from commutator.routing.pool import ModelPool
from commutator.routing.route import Route
from commutator.routing.view import LiveWorker, WorkerView
from commutator.types import GenerateRequest, RequestSummary

__all__ = ["Placed", "Placer"]

log = logging.getLogger(__name__)


@frozen(eq=False)
class Placed:
    """A decision whose load is accounted for. Whoever gets it releases the ticket."""

    route: Route
    ticket: Ticket


class Placer:
    """One model's way from a request to a worker that can be reached. Used from one event loop."""

    def __init__(
        self,
        model: str,
        pool: ModelPool[Any],
        view: WorkerView,
        load: InFlightLoad,
        busy: BusyConfig,
        waits: Callable[[int], None],
        *,
        prefill: bool = False,
    ) -> None:
        """``waits`` hears 1 when a request begins to wait for a worker, -1 when that ends.

        ``prefill``: for the workers that take nothing but prefill legs.
        """
        self._model = model
        self._prefill = prefill
        self._pool = pool
        self._view = view
        self._load = load
        self._busy = busy
        self._ahead = Ahead()
        self._admission: Admission[Placed] | None = None
        if busy.enabled:
            self._admission = Admission(busy, self._give_back, self._refusal, waits)

    @property
    def waiting(self) -> int:
        """Requests that wait for a worker."""
        return self._admission.waiting if self._admission is not None else 0

    @property
    def oldest_wait_s(self) -> float:
        """How long the first of them has waited."""
        return self._admission.oldest_s if self._admission is not None else 0.0

    def wake(self) -> None:
        """Some worker may have become free."""
        if self._admission is not None:
            self._admission.wake()

    async def place(
        self,
        summary: RequestSummary,
        hashes: Sequence[int],
        request: GenerateRequest | None = None,
        *,
        may_wait: bool,
        usable: Callable[[LiveWorker], bool] | None = None,
    ) -> Placed:
        """Pick a worker that can be reached.

        While all are busy the request waits, unless it may not: then it gets a busy one. A worker
        whose connection turns out to be dead is left out and the policy asked again. Raises
        RoutingError when no worker is ready, and its subclass OverloadedError when one has waited
        too long or too many do. ``usable`` leaves workers out. While ``request`` waits, the worker
        that would get it now may bring its blocks up from slow tiers.
        """
        if self._admission is not None and may_wait:
            return await self._place_in_turn(self._admission, summary, hashes, usable, request)
        while True:
            placed = self._take_any(summary, hashes, usable)
            if await self._reachable(placed):
                return placed

    async def _place_in_turn(
        self,
        admission: Admission[Placed],
        summary: RequestSummary,
        hashes: Sequence[int],
        usable: Callable[[LiveWorker], bool] | None,
        request: GenerateRequest | None,
    ) -> Placed:
        arrived_s = asyncio.get_running_loop().time()
        place = admission.place(summary.priority)
        attempt = partial(self._take_free, summary, hashes, usable)
        look = None
        if request is not None and self._pool.cache is not None:
            look = partial(self._look_ahead, summary, hashes, usable, request)
        again = False
        while True:
            if not self._workers(usable):
                raise self._none_ready()
            placed, waited_s = await admission.admit(
                place, arrived_s, attempt, again=again, when_near=look
            )
            if await self._reachable(placed):
                return evolve(placed, route=evolve(placed.route, waited_s=waited_s))
            again = True

    def _look_ahead(
        self,
        summary: RequestSummary,
        hashes: Sequence[int],
        usable: Callable[[LiveWorker], bool] | None,
        request: GenerateRequest,
    ) -> None:
        # It may become another by the time that it is free: then what came up serves the next turn.
        if workers := self._workers(usable):
            route = self._pool.route(summary, hashes, workers)
            self._ahead.ask(route.worker, route.candidate.overlap, request)

    def _take_any(
        self,
        summary: RequestSummary,
        hashes: Sequence[int],
        usable: Callable[[LiveWorker], bool] | None,
    ) -> Placed:
        workers = self._workers(usable)
        if not workers:
            raise self._none_ready()
        return self._taken(summary, self._pool.route(summary, hashes, workers))

    def _take_free(
        self,
        summary: RequestSummary,
        hashes: Sequence[int],
        usable: Callable[[LiveWorker], bool] | None,
    ) -> Placed | None:
        """None when every worker is busy, or lost for the moment."""
        workers = self._workers(usable)
        route = self._pool.route_to_free(summary, hashes, workers, self._busy)
        return None if route is None else self._taken(summary, route)

    def _taken(self, summary: RequestSummary, route: Route) -> Placed:
        ticket = self._load.dispatch(
            route.candidate.worker_id,
            summary.prompt_tokens,
            self._pool.block_size,
            cached_tokens=route.overlap_tokens,
        )
        return Placed(route, ticket)

    async def _reachable(self, placed: Placed) -> bool:
        """Whether the worker's connection stands. If not, the load is given back."""
        worker = placed.route.worker
        try:
            await worker.client.start()
        except EngineUnavailableError as error:
            log.warning("worker %s left out: %s", worker.record.worker_id, error)
            self._view.lost(worker)
            self._give_back(placed)
            return False
        except BaseException:
            self._give_back(placed)
            raise
        return True

    def _give_back(self, placed: Placed) -> None:
        self._load.release(placed.ticket)

    def _workers(self, usable: Callable[[LiveWorker], bool] | None = None) -> Sequence[LiveWorker]:
        workers = self._view.routable(self._model, prefill=self._prefill)
        return workers if usable is None else [worker for worker in workers if usable(worker)]

    def _none_ready(self) -> RoutingError:
        if self._prefill:
            return RoutingError(f'no prefill worker is ready for model "{self._model}"')
        if self._view.routable(self._model, prefill=True):
            return RoutingError(
                f'only prefill workers are ready for model "{self._model}", and none that decodes'
            )
        return RoutingError(f'no worker is ready for model "{self._model}"')

    def _refusal(self, reason: str, words: str, retry_after_s: float) -> RoutingError:
        workers = self._workers()
        if not workers:
            return self._none_ready()
        hits = [hit for hit in self._pool.hits(workers, self._busy) if hit is not None]
        # None may be busy any more: the queue is full of others who are about to be served.
        busy = f"{describe_busy(self._busy, hits)}; " if hits else ""
        return OverloadedError(f"{busy}{words}", retry_after_s, reason)

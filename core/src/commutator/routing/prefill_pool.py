"""The prefill workers of one model: whether a request is sent to one, to which, and when."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from attrs import frozen

from commutator.config.model import DisaggregationConfig
from commutator.routing.apart import Apart
from commutator.routing.cache_view import CacheView
from commutator.routing.disagg import DisaggQuestion
from commutator.routing.disagg_asker import DisaggAsker
from commutator.routing.handover_observer import HandoverObserver, NoHandoverObserver
from commutator.routing.handover_pairs import HandoverPairs
from commutator.routing.load import InFlightLoad
from commutator.routing.placer import Placed, Placer
from commutator.routing.pool import ModelPool
from commutator.routing.speeds import SpeedMeter
from commutator.routing.view import LiveWorker, WorkerView
from commutator.types import GenerateRequest, RequestSummary

__all__ = ["PrefillPool", "QueueState"]


@frozen
class QueueState:
    """The prefill queue of one model."""

    requests: int
    oldest_s: float
    """How long the first of them has waited."""


class PrefillPool:
    """Used from one event loop."""

    def __init__(
        self,
        model: str,
        config: DisaggregationConfig,
        asker: DisaggAsker,
        pool: ModelPool[CacheView],
        placer: Placer,
        view: WorkerView,
        load: InFlightLoad,
        pairs: HandoverPairs,
    ) -> None:
        self.model = model
        self.config = config
        self.pool = pool
        self.placer = placer
        self.view = view
        self.load = load
        self.pairs = pairs
        self.meter = SpeedMeter()
        self.observer: HandoverObserver = NoHandoverObserver()
        self._asker = asker

    def queue(self) -> QueueState:
        return QueueState(self.placer.waiting, self.placer.oldest_wait_s)

    def decide(
        self, summary: RequestSummary, request: GenerateRequest, decode: Placed
    ) -> Apart | None:
        """Ask the policy about a request that has its decode worker.

        None when no prefill worker is ready that could hand over to it: nothing was asked.
        """
        workers = self.view.routable(self.model, prefill=True)
        if not workers:
            return None
        fits = self.fitting(request, decode.route.worker)
        workers = [worker for worker in workers if fits(worker)]
        if not workers:
            return None
        hashes = self.hashes(request, decode)
        question = self._question(summary, decode, hashes, workers)
        answer = self._asker.ask(question)
        self.observer.decided(self.model, answer.separate, answer.reason)
        return Apart(self, summary, decode, hashes, question, answer)

    def fitting(self, request: GenerateRequest, decode: LiveWorker) -> Callable[[LiveWorker], bool]:
        """Whether a prefill worker can take the request and hand it over to ``decode``."""
        length, record = len(request.token_ids), decode.record

        def fits(worker: LiveWorker) -> bool:
            long_enough = worker.record.info.max_model_len > length
            return long_enough and self.pairs.problem(worker.record, record) is None

        return fits

    async def place(
        self,
        summary: RequestSummary,
        hashes: Sequence[int],
        fits: Callable[[LiveWorker], bool],
        avoid: Collection[LiveWorker],
    ) -> Placed:
        """A prefill worker; the first time the request may wait for it. Raises RoutingError."""

        def usable(worker: LiveWorker) -> bool:
            return worker not in avoid and fits(worker)

        return await self.placer.place(summary, hashes, may_wait=not avoid, usable=usable)

    def hashes(self, request: GenerateRequest, decode: Placed) -> Sequence[int]:
        """The prompt's, in this pool's blocks."""
        cache, known = self.pool.cache, decode.route.sequence_hashes
        if known and cache is not None and cache.index.block_size == decode.route.block_size:
            return known
        return self.pool.hashes(request)

    def _question(
        self,
        summary: RequestSummary,
        decode: Placed,
        hashes: Sequence[int],
        workers: Sequence[LiveWorker],
    ) -> DisaggQuestion:
        candidates = self.pool.candidates(hashes, workers)
        overlaps = (candidate.overlap.blocks for candidate in candidates)
        block_size = self.pool.block_size
        queue = self.queue()
        info = decode.route.worker.record.info.handover
        return DisaggQuestion(
            prompt_tokens=summary.prompt_tokens,
            cached_tokens=decode.route.overlap_tokens,
            decode_load=decode.route.candidate.load,
            prefill_loads={candidate.worker_id: candidate.load for candidate in candidates},
            prefill_cached_tokens=max(overlaps) * block_size,
            queued_prefills=queue.requests,
            queue_age_s=queue.oldest_s,
            token_bytes=info.token_bytes if info is not None else 0,
            speeds=self.meter.speeds(),
        )

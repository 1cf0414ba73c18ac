"""A request that its worker gets as the client sent it, for what only the engine itself can do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from commutator.engine.contract import ForwardedAnswer
from commutator.errors import EngineUnavailableError, RoutingError
from commutator.routing.dispatch import Surroundings
from commutator.routing.placer import Placed, Placer
from commutator.routing.route import RouteFacts
from commutator.types import FinishReason, RequestOutcome, RequestSummary

__all__ = ["RANK_HEADER", "Forward", "begin_forward"]

RANK_HEADER = "X-Data-Parallel-Rank"


async def begin_forward(
    summary: RequestSummary,
    hashes: Sequence[int],
    placer: Placer,
    around: Surroundings,
) -> Forward:
    """Pick one of the workers that take such requests. Raises RoutingError."""
    host = around.host
    host.request_received(summary)
    try:
        placed = await placer.place(
            summary, hashes, may_wait=True, usable=lambda worker: worker.record.info.forwards
        )
    except (RoutingError, asyncio.CancelledError) as error:
        host.request_failed(summary, error)
        raise
    host.request_routed(summary, placed.route.decision)
    return Forward(summary, placed, around)


class Forward:
    """Use it with ``async with``, which sends it; leaving aborts it and gives its load back.

    It is not migrated: what the worker has answered is not understood here. Raises what
    ``EngineClient.forward`` does.
    """

    def __init__(
        self,
        summary: RequestSummary,
        placed: Placed,
        around: Surroundings,
    ) -> None:
        self._summary = summary
        self._placed = placed
        self._view = around.view
        self._load = around.load
        self._host = around.host
        route = placed.route
        if around.cache is not None:
            record = route.worker.record
            around.cache.routed(record, route.candidate.rank, route.sequence_hashes)
        self._stack = AsyncExitStack()
        self._started_s = time.perf_counter()
        self._answer: ForwardedAnswer | None = None
        self._ended = False

    @property
    def worker_id(self) -> str:
        return self._placed.route.worker.record.worker_id

    @property
    def model(self) -> str:
        """What the worker calls the model."""
        return self._placed.route.worker.record.info.model

    @property
    def facts(self) -> RouteFacts:
        return self._placed.route.facts

    def explain(self) -> dict[str, Any]:
        """Why this worker: see ``Route.explain``."""
        return self._placed.route.explain()

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> ForwardedAnswer:
        """The worker's answer, whose body is read with ``chunks``.

        A header tells the data-parallel rank, which vLLM and SGLang look for in it.
        """
        route = self._placed.route
        client = route.worker.client
        if route.worker.record.info.data_parallel_size > 1:
            headers = {**headers, RANK_HEADER: str(route.candidate.rank)}
        sent = client.forward(path, body, headers)
        self._answer = await self._stack.enter_async_context(sent)
        return self._answer

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer's body."""
        assert self._answer is not None
        async for chunk in self._answer.chunks():
            if self._placed.ticket.prefilling:
                ttft_s = time.perf_counter() - self._started_s
                self._host.request_first_token(self._summary, self.worker_id, ttft_s)
                self._load.progress(self._placed.ticket, 1)
            yield chunk
        self._ended = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._load.release(self._placed.ticket)
        if isinstance(error, EngineUnavailableError):
            self._view.lost(self._placed.route.worker)
        if error is not None:
            self._host.request_failed(self._summary, error)
        else:
            self._host.request_finished(
                self._summary,
                RequestOutcome(
                    worker_id=self.worker_id,
                    finish_reason=FinishReason.STOP if self._ended else FinishReason.ABORT,
                    generated_tokens=0,
                    cached_tokens=0,
                    duration_s=time.perf_counter() - self._started_s,
                ),
            )
        await self._stack.aclose()

"""A request forwarded to the engine as the client sent it, for what only the engine can do."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Self

from commutator.contract.engine import ForwardedAnswer
from commutator.contract.request import FinishReason, RequestOutcome, RequestSummary
from commutator.errors import EngineUnavailableError
from commutator.routing.model import ModelRouting
from commutator.routing.placement import Placement

RANK_HEADER = "X-Data-Parallel-Rank"
"""The header for the data-parallel rank, which vLLM and SGLang read."""


class Forward:
    """One forwarded request. Use with ``async with``; leaving aborts it if it still runs.

    A forwarded request is never migrated, because its answer is not parsed. Raises the errors of
    ``EngineClient.forward``.
    """

    def __init__(
        self, summary: RequestSummary, placement: Placement, routing: ModelRouting
    ) -> None:
        self.route = route = placement.route
        self.worker_id = route.worker.record.worker_id
        self.info = route.worker.record.info
        self._summary = summary
        self.ticket = placement.ticket
        self._routing = routing
        self._stack = AsyncExitStack()
        self._started_s = time.perf_counter()
        self._answer: ForwardedAnswer | None = None
        self.complete = False
        if (indexer := routing.router.indexer) is not None:
            indexer.routed(route.worker.record, route.candidate.rank, route.sequence_hashes)

    @property
    def headers(self) -> Mapping[str, str]:
        """What the worker has to be told beside what the client sent."""
        rank = str(self.route.candidate.rank)
        return {RANK_HEADER: rank} if self.info.data_parallel_size > 1 else {}

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> ForwardedAnswer:
        """Send the request; read the body of the answer with ``chunks``."""
        sent = self.route.worker.client.forward(path, body, {**headers, **self.headers})
        self._answer = await self._stack.enter_async_context(sent)
        return self._answer

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer's body, as it arrives."""
        assert self._answer is not None
        async for chunk in self._answer.chunks():
            self.account(chunk)
            yield chunk
        self.complete = True

    def account(self, chunk: bytes) -> None:
        """A part of the answer has arrived, perhaps by a proxy that was told where to send it."""
        ticket = self.ticket
        if ticket.prefilling:
            ttft_s = time.perf_counter() - self._started_s
            self._routing.host.request_first_token(self._summary, self.worker_id, ttft_s)
            self._routing.load.progress(ticket, 1)
        if ticket.on_served is not None:
            ticket.on_served(0, _tokens(chunk))

    async def __aenter__(self) -> Self:
        self.route.worker.requests += 1
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.route.worker.requests -= 1
        self._routing.load.release(self.ticket)
        if isinstance(error, EngineUnavailableError):
            self._routing.workers.lost(self.route.worker)
        if error is not None:
            self._routing.host.request_failed(self._summary, error, self.worker_id)
        else:
            self._routing.host.request_finished(
                self._summary,
                RequestOutcome(
                    worker_id=self.worker_id,
                    finish_reason=FinishReason.STOP if self.complete else FinishReason.ABORT,
                    generated_tokens=0,
                    cached_tokens=0,
                    duration_s=time.perf_counter() - self._started_s,
                ),
            )
        await self._stack.aclose()


_TOKEN_BYTES = 4
"""Of English text."""


def _tokens(chunk: bytes) -> int:
    """About the tokens in a part of an answer, which is not parsed: events, or else its length."""
    return chunk.count(b"data:") or len(chunk) // _TOKEN_BYTES

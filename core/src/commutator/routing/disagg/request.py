"""A request that is prefilled at one worker and decoded at another."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from typing import Any, Literal

from attrs import define, evolve

from commutator.contract.disagg import HandoverOutcome, HandoverRequest, HandoverStyle, PhaseOutcome
from commutator.contract.engine import TokenStream
from commutator.contract.request import FinishReason, RequestSummary, TokenDelta
from commutator.errors import (
    EngineError,
    EngineHandoverError,
    EngineNeedsPrefillError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestError,
    RoutingError,
)
from commutator.routing.disagg.prefill_pool import DisaggDecision, PrefillPool
from commutator.routing.placement import Placement, WorkerRequest
from commutator.routing.workers import LiveWorker

log = logging.getLogger(__name__)


@define(eq=False)
class _Try:
    """One try to hand the prompt's KV over from a prefill worker."""

    worker_id: str
    """The prefill worker's."""
    prefill: WorkerRequest | None = None
    task: asyncio.Task[None] | None = None
    """Reads the prefill worker's stream."""
    outcome: PhaseOutcome | None = None
    """How the prefill ended; None while it runs."""
    error: Exception | None = None
    """Why the prefill failed."""
    handed: Mapping[str, Any] | None = None
    """The hand-over parameters that the prefill worker sent for the decode worker."""
    cached_tokens: int = 0
    """Prompt tokens that the prefill worker found in its KV cache."""
    ended_s: float | None = None
    """When the prefill was done, by ``time.perf_counter``."""
    stream: TokenStream | None = None
    """The decode worker's."""
    first: asyncio.Task[TokenDelta] | None = None
    """Waits for the decode worker's first tokens."""
    decode: PhaseOutcome | None = None
    handover_s: float | None = None
    size_bytes: int = 0
    cancel_s: float | None = None
    prefill_s: float | None = None
    prefilled_tokens: int = 0
    settled: bool = False
    """The decode side has ended, or will not begin."""

    @property
    def unwanted(self) -> bool:
        """The decode worker gave up the hand-over before the prefill worker began.

        The decode worker then reports the cause: it failed, or found the whole prompt in its own
        cache.
        """
        return isinstance(self.error, EngineHandoverError)


class DisaggRequest:
    """The token stream of a request that is prefilled at one worker and decoded at another.

    Until the first token, when one side fails the other is stopped before anything else is tried.
    ``disaggregation.on_failure`` decides what follows a failed hand-over: another prefill worker,
    prefill at the decode worker, or the error for the client. Other errors of the decode worker
    are raised unchanged. After the first token it does not matter how the prefill ends.

    The first ``__anext__`` begins the hand-over. Close the stream however the request ends.
    """

    def __init__(
        self,
        pool: PrefillPool,
        summary: RequestSummary,
        decision: DisaggDecision,
        decode: WorkerRequest,
    ) -> None:
        """``decode`` is the request at its decode worker."""
        self._pool = pool
        self._summary = summary
        self._hashes = decision.sequence_hashes
        self._decode = decode
        self._local_prefill_tokens = decode.ticket.prefill_tokens
        self._fits = pool.fitting(decode.request, decode.worker)
        self._avoid: set[LiveWorker] = set()
        self._refusal: RoutingError | None = None
        self._try: _Try | None = None
        self._stream: TokenStream | None = None
        self._closed = False
        self._outcome = "pending"
        self._prefill_worker: str | None = None
        self._waited_s = 0.0
        self._failed: list[dict[str, str]] = []
        pool.load.expect(decode.ticket, 0)

    def __aiter__(self) -> DisaggRequest:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._stream is not None:
            return await self._stream.__anext__()
        if self._closed:
            raise StopAsyncIteration
        return await self._first_delta()

    async def aclose(self) -> None:
        self._closed = True
        if self._stream is not None:
            await self._stream.aclose()
        if self._try is not None:
            await self._stop_prefill(self._try)

    def explain(self) -> dict[str, Any]:
        """The course of the hand-over, for people."""
        return {
            "prefill_worker_id": self._prefill_worker,
            "prefill_waited_s": round(self._waited_s, 6),
            "outcome": self._outcome,
            "failed": self._failed,
        }

    async def _first_delta(self) -> TokenDelta:
        failures = 0
        while (placement := await self._place()) is not None:
            result = await self._hand_over(placement)
            if isinstance(result, TokenDelta):
                return result
            overloaded = isinstance(result, EngineOverloadedError)
            failures += not overloaded
            on_failure = self._pool.config.on_failure
            fallback = on_handover_failure(on_failure, failures, overloaded=overloaded)
            if fallback == "fail":
                self._outcome = "failed"
                if isinstance(result, RequestError):
                    raise result
                text = f"prefill at {self._prefill_worker} for {self._decode_id} failed: {result}"
                raise EngineHandoverError(text) from result
            if fallback == "prefill_locally":
                break
            self._avoid.add(placement.route.worker)
        return await self._prefill_locally()

    async def _place(self) -> Placement | None:
        """Choose a prefill worker; None when none is ready or none became free in time.

        The request waits for its first one, but not for further ones.
        """
        pool, summary = self._pool, evolve(self._summary, max_tokens=1)
        try:
            placement = await pool.placer.place(
                summary,
                self._hashes,
                may_wait=not self._avoid,
                usable=lambda worker: worker not in self._avoid and self._fits(worker),
            )
        except RoutingError as error:
            self._outcome, self._refusal = str(error), error
            self._report(_Try("", outcome="refused", settled=True))
            return None
        self._prefill_worker = placement.route.decision.worker_id
        if waited_s := placement.route.waited_s:
            self._waited_s += waited_s
            pool.host.request_queued(self._summary, "prefill", waited_s)
        return placement

    async def _hand_over(self, placement: Placement) -> TokenDelta | Exception:
        """The decode worker's first tokens, or the error for which the KV did not arrive.

        Unless it returns tokens, both sides have stopped when it returns or raises.
        """
        attempt = self._try = _Try(placement.route.decision.worker_id)
        try:
            result = await self._run_both(attempt, placement)
        except BaseException as error:
            what = f"decode at {self._decode_id}"
            running = attempt.task is not None and not attempt.task.done()
            await self._stop(attempt, error, what if running else None)
            raise
        if isinstance(result, TokenDelta):
            self._arrived(attempt)
            cached_tokens = max(result.cached_tokens or 0, attempt.cached_tokens)
            return evolve(result, cached_tokens=cached_tokens)
        self._failed.append({"prefill_worker": attempt.worker_id, "reason": str(result)})
        what = f"prefill at {attempt.worker_id} for {self._decode_id}"
        await self._stop(attempt, result, what)
        return result

    async def _run_both(self, attempt: _Try, placement: Placement) -> TokenDelta | Exception:
        """Run both sides until the first tokens, or until the KV can no longer arrive."""
        decode, route = self._decode, placement.route
        style = self._style(decode.worker)
        handover = HandoverRequest(
            handover_id=os.urandom(12).hex(),
            request=decode.request,
            prefill=route.worker.record,
            decode=decode.worker.record,
            prefill_rank=route.candidate.rank,
            decode_rank=decode.route.candidate.rank,
            timeout_s=self._pool.config.timeout_s,
        )
        try:
            task = attempt.task = self._begin_prefill(attempt, placement, handover)
        except Exception as error:  # noqa: BLE001 - a hand-over style may raise anything
            attempt.outcome = "failed"
            return error
        if style.sequential:
            await asyncio.wait({task})
            if attempt.error is not None:
                return attempt.error
        try:
            request = style.decode_request(handover, attempt.handed)
        except Exception as error:  # noqa: BLE001 - a hand-over style may raise anything
            return error
        attempt.stream = decode.worker.client.generate(request)
        first = attempt.first = asyncio.create_task(_first_tokens(attempt.stream))
        await asyncio.wait({first, task}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            if attempt.error is not None and not attempt.unwanted:
                return attempt.error
            await asyncio.wait({first})
        try:
            return first.result()
        except EngineHandoverError as error:
            return error if attempt.error is None or attempt.unwanted else attempt.error

    def _begin_prefill(
        self, attempt: _Try, placement: Placement, handover: HandoverRequest
    ) -> asyncio.Task[None]:
        pool, prefill = self._pool, None
        try:
            request = self._style(placement.route.worker).prefill_request(handover)
            prefill = WorkerRequest(request, placement, pool.router.indexer, pool.load, "prefill")
            prefill.stream = prefill.worker.client.generate(prefill.request)
        except Exception as error:
            if prefill is not None:
                prefill.release(error)
            else:
                pool.load.release(placement.ticket)
            raise
        attempt.prefill = prefill
        return asyncio.create_task(self._run_prefill(attempt, prefill))

    async def _run_prefill(self, attempt: _Try, prefill: WorkerRequest) -> None:
        pool, began_s = self._pool, time.perf_counter()
        try:
            await _read_prefill(attempt, prefill)
        except Exception as error:  # noqa: BLE001 - the task that waits for this one reads it
            if isinstance(error, EngineUnavailableError):
                pool.placer.workers.lost(prefill.worker)
            attempt.error = error
            overloaded = isinstance(error, EngineOverloadedError)
            await self._end_prefill(attempt, "refused" if overloaded else "failed")
        else:
            attempt.ended_s = time.perf_counter()
            ahead = prefill.route.candidate.load.active_prefill_tokens
            tokens = ahead + prefill.ticket.prefill_tokens
            attempt.prefill_s, attempt.prefilled_tokens = attempt.ended_s - began_s, tokens
            pool.speeds.prefill.add(tokens, attempt.prefill_s)
            await self._end_prefill(attempt, "done")

    async def _stop_prefill(self, attempt: _Try) -> None:
        if attempt.task is not None:
            attempt.task.cancel()
            await asyncio.wait({attempt.task})
        await self._end_prefill(attempt, "cancelled")

    async def _end_prefill(self, attempt: _Try, outcome: PhaseOutcome) -> None:
        """End the prefill side. Idempotent: the first outcome counts."""
        if attempt.outcome is not None:
            return
        attempt.outcome = outcome
        try:
            if attempt.prefill is not None:
                await attempt.prefill.stream.aclose()
        finally:
            if attempt.prefill is not None:
                attempt.prefill.release(attempt.error)
            self._report(attempt)

    async def _stop(self, attempt: _Try, error: BaseException, what: str | None) -> None:
        """Stop both sides because of ``error``; log that ``what`` failed, unless it is None."""
        failed_s = time.perf_counter()
        if (first := attempt.first) is not None and (stream := attempt.stream) is not None:
            attempt.decode = "failed" if first.done() else "cancelled"
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await stream.aclose()
        await self._stop_prefill(attempt)
        attempt.settled = True
        if what is not None and isinstance(error, Exception):
            attempt.cancel_s = time.perf_counter() - failed_s
            log.warning(
                "request %s: %s failed: %s; both sides stopped after %.1f ms",
                self._summary.request_id, what, error, attempt.cancel_s * 1e3,
            )  # fmt: skip
        self._report(attempt)

    def _arrived(self, attempt: _Try) -> None:
        """Record that the decode worker has sent its first tokens."""
        self._stream = attempt.stream
        attempt.decode, attempt.settled = "done", True
        if attempt.unwanted:
            self._outcome = "not needed: the decode worker had the KV"
        else:
            self._outcome = "handed over"
            now_s, info = time.perf_counter(), self._decode.worker.record.info.handover
            token_bytes = info.token_bytes if info is not None else 0
            attempt.size_bytes = self._local_prefill_tokens * token_bytes
            attempt.handover_s = now_s - (attempt.ended_s or now_s)
            self._pool.speeds.handover.add(attempt.size_bytes, attempt.handover_s)
        self._report(attempt)

    def _report(self, attempt: _Try) -> None:
        """Call the hook once both sides have ended."""
        if not attempt.settled or attempt.outcome is None:
            return
        outcome = HandoverOutcome(
            prefill_worker=attempt.worker_id,
            decode_worker=None if attempt.decode is None else self._decode_id,
            prefill=attempt.outcome,
            decode=attempt.decode,
            handover_s=attempt.handover_s,
            size_bytes=attempt.size_bytes,
            cancel_s=attempt.cancel_s,
            prefill_s=attempt.prefill_s,
            prefilled_tokens=attempt.prefilled_tokens,
        )
        self._pool.host.kv_handed_over(self._summary, outcome)

    async def _prefill_locally(self) -> TokenDelta:
        """Send the whole request to the decode worker; KV that did arrive is in its cache.

        If the decode worker does not prefill, raises the error of choosing a prefill worker.
        """
        if self._failed:
            self._outcome = "prefilled locally after a failure"
        decode = self._decode
        self._pool.load.expect(decode.ticket, self._local_prefill_tokens)
        self._stream = decode.worker.client.generate(decode.request)
        try:
            return await self._stream.__anext__()
        except EngineNeedsPrefillError as error:
            if self._refusal is None:
                raise
            raise self._refusal from error

    @property
    def _decode_id(self) -> str:
        return self._decode.route.decision.worker_id

    def _style(self, worker: LiveWorker) -> HandoverStyle:
        style = self._pool.compatibility.style(worker.record)
        assert style is not None, "a worker that fits has one"
        return style


async def _read_prefill(attempt: _Try, prefill: WorkerRequest) -> None:
    """Read the prefill worker's stream to its end. Raises the worker's error."""
    async for delta in prefill.stream:
        if delta.cached_tokens is not None:
            attempt.cached_tokens = delta.cached_tokens
        prefill.account(delta)
        if delta.finish_reason in {FinishReason.ERROR, FinishReason.ABORT}:
            raise EngineError(delta.error or f"worker {prefill.worker_id} ended the prefill")
        if delta.finish_reason is not None:
            attempt.handed = delta.handover
            return
    raise prefill.incomplete()


async def _first_tokens(stream: TokenStream) -> TokenDelta:
    """The deltas up to the first token, as one. Raises EngineHandoverError if the KV is missing."""
    cached: int | None = None
    while True:
        delta = await stream.__anext__()
        cached = delta.cached_tokens if cached is None else cached
        if delta.finish_reason is FinishReason.ERROR and delta.handover_failed:
            raise EngineHandoverError(delta.error or "the KV did not arrive")
        if delta.token_ids or delta.finish_reason is not None:
            return evolve(delta, cached_tokens=cached)


Fallback = Literal["fail", "prefill_locally", "another_worker"]
"""What follows a failed hand-over; ``disaggregation.on_failure`` has the same values."""


def on_handover_failure(on_failure: Fallback, failures: int, *, overloaded: bool) -> Fallback:
    """What follows the ``failures``-th failed hand-over of a request.

    ``overloaded``: the prefill worker was full. That does not count as a failure, and another
    worker is tried whatever ``on_failure`` says.
    """
    if overloaded:
        return "another_worker"
    if on_failure == "another_worker" and failures > 1:
        return "prefill_locally"
    return on_failure

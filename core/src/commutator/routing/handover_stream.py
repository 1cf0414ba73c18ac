"""A request at two workers: both legs in one scope, and other ways when they fail."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from commutator.engine.contract import TokenStream
from commutator.engine.handover import HandoverLegs, HandoverStyle
from commutator.errors import (
    EngineHandoverError,
    EngineNeedsPrefillError,
    EngineOverloadedError,
    RequestError,
    RoutingError,
)
from commutator.routing.handover_failure import Way, next_way
from commutator.routing.handover_observer import LegOutcome
from commutator.routing.leg import Leg
from commutator.routing.placer import Placed
from commutator.routing.prefill_leg import HandoverFailedError, PrefillLeg
from commutator.routing.view import LiveWorker
from commutator.types import FinishReason, GenerateRequest, RequestSummary, TokenDelta

if TYPE_CHECKING:
    from commutator.routing.prefill_pool import PrefillPool

__all__ = ["FailedTry", "HandoverStream"]

log = logging.getLogger(__name__)


@frozen
class FailedTry:
    """A hand-over that did not come about."""

    prefill_worker: str
    reason: str


class HandoverStream:
    """The decode leg's deltas. Begun with the first ``__anext__``; close it on every way out.

    Until the first token both legs belong to one scope: whichever fails, the other is stopped
    before anything else is tried. After it the prefill has done its work, and how it ends does not
    matter any more. What the decode worker fails at other than the hand-over is raised as it is.
    """

    def __init__(
        self,
        pool: PrefillPool,
        summary: RequestSummary,
        request: GenerateRequest,
        decode: Placed,
        hashes: Sequence[int],
    ) -> None:
        """``hashes`` are the prompt's in the prefill pool's blocks."""
        self.outcome = "pending"
        """For people: what has become of it."""
        self.prefill_worker: str | None = None
        self.waited_s = 0.0
        """In the prefill queue."""
        self.failed: list[FailedTry] = []
        self._pool = pool
        self._summary = evolve(summary, max_tokens=1)
        self._request = request
        self._decode = decode
        self._hashes = hashes
        self._fits = pool.fitting(request, decode.route.worker)
        self._local_prefill_tokens = decode.ticket.prefill_tokens
        self._avoid: set[LiveWorker] = set()
        self._refusal: RoutingError | None = None
        self._prefill: PrefillLeg | None = None
        self._answer: TokenStream | None = None
        self._closed = False
        pool.load.expect(decode.ticket, 0)

    def __aiter__(self) -> HandoverStream:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._answer is None and not self._closed:
            return await self._first()
        if self._answer is None:
            raise StopAsyncIteration
        return await self._answer.__anext__()

    async def aclose(self) -> None:
        self._closed = True
        if self._answer is not None:
            await self._answer.aclose()
        if self._prefill is not None:
            await self._prefill.stop()

    async def _first(self) -> TokenDelta:
        failures = 0
        while (placed := await self._place()) is not None:
            try:
                return await self._both(placed)
            except HandoverFailedError as failed:
                self._tell_failure(placed, failed)
                overloaded = isinstance(failed.cause, EngineOverloadedError)
                failures += not overloaded
                on_failure = self._pool.config.on_failure
                way = next_way(on_failure, failures, overloaded=overloaded)
                if way is Way.FAIL:
                    self.outcome = "failed"
                    raise _for_client(failed.cause, placed, self._decode) from failed.cause
                if way is Way.LOCALLY:
                    break
                self._avoid.add(placed.route.worker)
        return await self._locally()

    async def _place(self) -> Placed | None:
        """A prefill worker; None when there is none, or none in time."""
        pool = self._pool
        try:
            placed = await pool.place(self._summary, self._hashes, self._fits, self._avoid)
        except RoutingError as error:
            self.outcome, self._refusal = str(error), error
            pool.observer.leg_ended(pool.model, "prefill", "refused")
            return None
        self.prefill_worker = placed.route.decision.worker_id
        self.waited_s += placed.route.waited_s
        if placed.route.waited_s:
            pool.observer.prefill_queued(pool.model, placed.route.waited_s)
        return placed

    async def _both(self, placed: Placed) -> TokenDelta:
        """The first tokens of the decode leg. Otherwise both legs are stopped when it raises."""
        style, legs = self._style(), self._legs(placed)
        prefill = self._prefill = self._begin_prefill(placed, legs)
        try:
            if style.sequential:
                await asyncio.wait({prefill.task})
                prefill.check()
            delta = await self._begin_decode(style, legs, prefill)
        except BaseException as error:
            failed_s, ran = time.perf_counter(), not prefill.task.done()
            await prefill.stop()
            if ran and isinstance(error, Exception) and not isinstance(error, HandoverFailedError):
                decode_id = self._decode.route.decision.worker_id
                self._tell_stopped(f"decode at {decode_id}", error, failed_s)
            raise
        self._arrived(prefill)
        cached_tokens = max(delta.cached_tokens or 0, prefill.cached_tokens)
        return evolve(delta, cached_tokens=cached_tokens)

    def _begin_prefill(self, placed: Placed, legs: HandoverLegs) -> PrefillLeg:
        pool = self._pool
        try:
            style = pool.pairs.style(legs.prefill)
            assert style is not None
            request = style.prefill_request(legs)
            leg = Leg(request, placed, pool.pool.cache, pool.load, phase="prefill")
        except Exception as error:
            pool.load.release(placed.ticket)
            raise HandoverFailedError(error) from error
        return PrefillLeg(pool.model, leg, pool.view, pool.meter, pool.observer)

    async def _begin_decode(
        self, style: HandoverStyle, legs: HandoverLegs, prefill: PrefillLeg
    ) -> TokenDelta:
        stream = self._generate(style, legs, prefill.handed)
        first = asyncio.create_task(_first_tokens(stream))
        try:
            delta = await _arrival(first, prefill)
        except BaseException:
            outcome: LegOutcome = "failed" if first.done() else "cancelled"
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await stream.aclose()
            self._pool.observer.leg_ended(self._pool.model, "decode", outcome)
            raise
        self._answer = stream
        return delta

    def _generate(
        self, style: HandoverStyle, legs: HandoverLegs, handed: Mapping[str, Any] | None
    ) -> TokenStream:
        try:
            request = style.decode_request(legs, handed)
        except Exception as error:
            raise HandoverFailedError(error) from error
        return self._decode.route.worker.client.generate(request)

    async def _locally(self) -> TokenDelta:
        """As if nothing had been tried; what had arrived is in the decode worker's cache.

        A decode worker that computes no prompts fails with the reason why no other one did.
        """
        pool, worker = self._pool, self._decode.route.worker
        if self.failed:
            self.outcome = "prefilled locally after a failure"
        pool.load.expect(self._decode.ticket, self._local_prefill_tokens)
        self._answer = worker.client.generate(self._request)
        try:
            return await self._answer.__anext__()
        except EngineNeedsPrefillError as error:
            if self._refusal is None:
                raise
            raise self._refusal from error

    def _arrived(self, prefill: PrefillLeg) -> None:
        pool, now_s = self._pool, time.perf_counter()
        pool.observer.leg_ended(pool.model, "decode", "done")
        if prefill.unwanted:
            self.outcome = "not needed: the decode worker had the KV"
            return
        self.outcome = "handed over"
        info = self._decode.route.worker.record.info.handover
        token_bytes = info.token_bytes if info is not None else 0
        size_bytes = self._local_prefill_tokens * token_bytes
        took_s = now_s - (prefill.ended_s or now_s)
        pool.meter.handover.add(size_bytes, took_s)
        pool.observer.handed_over(pool.model, took_s, size_bytes)

    def _tell_failure(self, placed: Placed, failed: HandoverFailedError) -> None:
        here, there = self._decode.route.decision.worker_id, placed.route.decision.worker_id
        self.failed.append(FailedTry(there, str(failed.cause)))
        self._tell_stopped(f"prefill at {there} for {here}", failed.cause, failed.at_s)

    def _tell_stopped(self, what: str, cause: Exception, failed_s: float) -> None:
        pool, took_s = self._pool, time.perf_counter() - failed_s
        pool.observer.cancelled(pool.model, took_s)
        log.warning(
            "request %s: %s failed: %s; both legs stopped after %.1f ms",
            self._summary.request_id, what, cause, took_s * 1e3,
        )  # fmt: skip

    def _style(self) -> HandoverStyle:
        style = self._pool.pairs.style(self._decode.route.worker.record)
        assert style is not None, "a pair that fits has one"
        return style

    def _legs(self, placed: Placed) -> HandoverLegs:
        return HandoverLegs(
            handover_id=os.urandom(12).hex(),
            request=self._request,
            prefill=placed.route.worker.record,
            decode=self._decode.route.worker.record,
            prefill_rank=placed.route.candidate.rank,
            decode_rank=self._decode.route.candidate.rank,
            timeout_s=self._pool.config.timeout_s,
        )


async def _first_tokens(stream: TokenStream) -> TokenDelta:
    """Its deltas up to the first token as one. Raises EngineHandoverError when it says so."""
    cached: int | None = None
    while True:
        delta = await stream.__anext__()
        cached = delta.cached_tokens if cached is None else cached
        if delta.finish_reason is FinishReason.ERROR and delta.handover_failed:
            raise EngineHandoverError(delta.error or "the KV did not arrive")
        if delta.token_ids or delta.finish_reason is not None:
            return evolve(delta, cached_tokens=cached)


async def _arrival(first: asyncio.Task[TokenDelta], prefill: PrefillLeg) -> TokenDelta:
    """The decode leg's first tokens. Raises HandoverFailedError once the KV cannot come."""
    await asyncio.wait({first, prefill.task}, return_when=asyncio.FIRST_COMPLETED)
    if not first.done():
        if not prefill.unwanted:
            prefill.check()
        await asyncio.wait({first})
    try:
        return first.result()
    except EngineHandoverError as error:
        cause = None if prefill.unwanted else prefill.error
        raise HandoverFailedError(cause or error) from error


def _for_client(cause: Exception, prefill: Placed, decode: Placed) -> Exception:
    if isinstance(cause, RequestError):
        return cause
    here, there = decode.route.decision.worker_id, prefill.route.decision.worker_id
    return EngineHandoverError(f"prefill at {there} for {here} failed: {cause}")

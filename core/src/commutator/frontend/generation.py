"""Runs a plan: every engine request at once, their pieces as they come, all ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from commutator.frontend.choice import Choice, Piece
from commutator.frontend.plan import Plan
from commutator.frontend.responses import PromptTokensDetails, Usage
from commutator.frontend.services import Dispatched, RequestDispatcher
from commutator.observe.metrics import FrontendMetrics

__all__ = ["Generation"]

Batch = list[tuple[int, Piece]]
"""(number of the answer, what is new)"""


class Generation:
    """Use it with ``async with``: on the way out every engine request that still runs is aborted.

    Errors are those of ``RequestDispatcher.dispatch`` and of its streams. If one answer fails, all
    of them end.
    """

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        metrics: FrontendMetrics,
        plan: Plan,
        arrived_s: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._plan = plan
        self._metrics = metrics
        self.choices = [Choice(plan.text, plan.rules) for _ in plan.requests]
        self.times = [metrics.token_times(plan.model, arrived_s) for _ in plan.requests]
        self._dispatched: list[Dispatched] = []

    @property
    def explanations(self) -> list[dict[str, Any]]:
        return [dispatched.explain() for dispatched in self._dispatched]

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Each worker once, in order of the answers."""
        return tuple(dict.fromkeys(dispatched.worker_id for dispatched in self._dispatched))

    async def __aenter__(self) -> Self:
        plan = self._plan
        try:
            for request, hashes in zip(plan.requests, plan.sequence_hashes, strict=True):
                # Waiting for a worker that runs an earlier answer to the same request might never
                # end, so the first is admitted for all of them.
                dispatched = await self._dispatcher.dispatch(
                    plan.model,
                    request,
                    plan.session_id,
                    hashes,
                    may_wait=not self._dispatched,
                )
                self._dispatched.append(dispatched)
                facts = dispatched.facts
                self._metrics.routed(
                    plan.model,
                    facts.routing_s,
                    facts.overlap_blocks,
                    facts.best_overlap_blocks - facts.overlap_blocks,
                )
                if facts.waited_s:
                    self._metrics.waited(plan.model, facts.waited_s)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """What has come, until every answer is finished. Close the iterator if you leave early."""
        if len(self._dispatched) == 1:
            async for piece in self._pieces(0):
                yield [(0, piece)]
            return
        async with aclosing(self._merged()) as merged:
            async for batch in merged:
                yield batch

    def usage(self) -> Usage:
        """Tokens so far. Cached tokens are those of each prompt's first answer."""
        prompt = self._plan.prompt_tokens
        generated = sum(choice.generated_tokens for choice in self.choices)
        first_answers = self.choices[:: self._plan.answers_per_prompt]
        cached = sum(choice.cached_tokens for choice in first_answers)
        return Usage(prompt, generated, prompt + generated, PromptTokensDetails(cached))

    async def _pieces(self, number: int) -> AsyncGenerator[Piece, None]:
        choice, times = self.choices[number], self.times[number]
        async for delta in self._dispatched[number]:
            if delta.token_ids:
                times.tokens(len(delta.token_ids))
            piece = choice.push(delta)
            yield piece
            if piece.finish_reason is not None:
                break
        # After a stop string the engine may still be at work.
        await self._dispatched[number].stop()

    async def _merged(self) -> AsyncGenerator[Batch, None]:
        ready: asyncio.Queue[tuple[int, Piece] | BaseException] = asyncio.Queue()
        pumps = [
            asyncio.create_task(self._pump(number, ready)) for number in range(len(self.choices))
        ]
        running = len(pumps)
        try:
            while running:
                items = [await ready.get()]
                while not ready.empty():
                    items.append(ready.get_nowait())
                batch: Batch = []
                for item in items:
                    if isinstance(item, BaseException):
                        raise item
                    batch.append(item)
                    running -= item[1].finish_reason is not None
                yield batch
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, number: int, ready: asyncio.Queue[tuple[int, Piece] | BaseException]
    ) -> None:
        try:
            async for piece in self._pieces(number):
                ready.put_nowait((number, piece))
        except Exception as error:  # noqa: BLE001 - handed to whoever reads the queue
            ready.put_nowait(error)

    async def _close(self) -> None:
        for dispatched in self._dispatched:
            await dispatched.aclose()

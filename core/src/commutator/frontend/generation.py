"""Runs a plan: every engine request at once, their pieces as they come, all ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self

from commutator.frontend.choice import Choice, Piece
from commutator.frontend.plan import Plan
from commutator.frontend.responses import PromptTokensDetails, Usage
from commutator.frontend.services import Dispatched, RequestDispatcher
from commutator.observe.metrics import FrontendMetrics
from commutator.observe.token_times import TokenTimes

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
        deadline_s: float | None = None,
    ) -> None:
        """``deadline_s`` is by the event loop's clock."""
        self._dispatcher = dispatcher
        self._deadline_s = deadline_s
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
        """Each worker once, in order of the answers; grows when one is replaced."""
        if len(self._dispatched) == 1:
            return tuple(self._dispatched[0].worker_ids)
        served = (worker_id for one in self._dispatched for worker_id in one.worker_ids)
        return tuple(dict.fromkeys(served))

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
                    migration_limit=plan.migration_limit,
                    deadline_s=self._deadline_s,
                )
                self._dispatched.append(dispatched)
                self._metrics.routed(plan.model, dispatched.facts)
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

    def batches(self) -> _Answer | AsyncGenerator[Batch, None]:
        """What has come, until every answer is finished. Close the iterator if you leave early."""
        return self._answer(0) if len(self._dispatched) == 1 else self._merged()

    def usage(self) -> Usage:
        """Tokens so far. Cached tokens are those of each prompt's first answer."""
        prompt = self._plan.prompt_tokens
        generated = sum(choice.generated_tokens for choice in self.choices)
        first_answers = self.choices[:: self._plan.answers_per_prompt]
        cached = sum(choice.cached_tokens for choice in first_answers)
        return Usage(prompt, generated, prompt + generated, PromptTokensDetails(cached))

    def _answer(self, number: int) -> _Answer:
        return _Answer(number, self._dispatched[number], self.choices[number], self.times[number])

    async def _merged(self) -> AsyncGenerator[Batch, None]:
        ready: asyncio.Queue[Batch | BaseException] = asyncio.Queue()
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
                    batch += item
                    running -= item[-1][1].finish_reason is not None
                yield batch
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, number: int, ready: asyncio.Queue[Batch | BaseException]) -> None:
        try:
            async for batch in self._answer(number):
                ready.put_nowait(batch)
        except Exception as error:  # noqa: BLE001 - handed to whoever reads the queue
            ready.put_nowait(error)

    async def _close(self) -> None:
        for dispatched in self._dispatched:
            await dispatched.aclose()


class _Answer:
    """The pieces of one answer. Not a generator: the loop keeps books on each of those."""

    def __init__(
        self, number: int, dispatched: Dispatched, choice: Choice, times: TokenTimes
    ) -> None:
        self._number = number
        self._dispatched = dispatched
        self._choice = choice
        self._times = times
        self._finished = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        if self._finished:
            raise StopAsyncIteration
        delta = await self._dispatched.__anext__()
        if delta.token_ids:
            self._times.tokens(len(delta.token_ids))
        piece = self._choice.push(delta)
        if piece.finish_reason is not None:
            self._finished = True
            await self._dispatched.stop()  # after a stop string the engine may still be at work
        return [(self._number, piece)]

    async def aclose(self) -> None:
        """Nothing to do: the request belongs to the generation."""

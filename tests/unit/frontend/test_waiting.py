"""The front door over a dispatcher that holds requests back: its own places, errors, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.support.front_door import MODEL, FakeDispatch, FakeDispatcher, FrontDoor, front_door

from commutator.contract.request import UNKNOWN_CALLER, Caller, GenerateRequest
from commutator.errors import EngineOverloadedError, OverloadedError


class HoldingBack(FakeDispatcher):
    """Requests of a priority above 0 wait until they are ``freed``."""

    def __init__(self) -> None:
        super().__init__()
        self.freed = asyncio.Event()
        self.may_wait: list[bool] = []

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
    ) -> FakeDispatch:
        self.may_wait.append(may_wait)
        if request.priority > 0:
            self.on_waiting(1)
            try:
                await self.freed.wait()
            finally:
                self.on_waiting(-1)
        return await super().dispatch(model, request, caller, sequence_hashes)


def places(door: FrontDoor) -> tuple[int, int]:
    queue = door.services.limiter
    return queue.running, queue.waiting


async def test_a_request_that_waits_for_a_worker_takes_no_place_of_the_front_door() -> None:
    dispatcher = HoldingBack()
    async with front_door(dispatcher, max_concurrent_requests=1, max_queued_requests=1) as door:
        waiting = [asyncio.create_task(door.chat(priority=1)) for _ in range(4)]
        while len(dispatcher.may_wait) < 4:
            await asyncio.sleep(0.001)
        assert places(door) == (0, 0)
        assert (await door.chat(priority=-1))[0] == 200, "the urgent one is let in"
        waiting[0].cancel()
        dispatcher.freed.set()
        statuses = [status for status, _ in await asyncio.gather(*waiting[1:])]
        assert statuses == [200] * 3
        while places(door) != (0, 0):
            await asyncio.sleep(0.001)


async def test_a_deadline_that_passes_while_waiting() -> None:
    async with front_door(HoldingBack(), request_timeout_s=0.1) as door:
        status, _ = await door.chat(priority=1)
        assert status == 504
        assert places(door) == (0, 0)


async def test_only_the_first_answer_of_a_request_waits() -> None:
    dispatcher = HoldingBack()
    async with front_door(dispatcher) as door:
        await door.chat(n=3)
    assert dispatcher.may_wait == [True, False, False]


async def test_refusals_are_explained_and_counted_by_reason() -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        for error in (
            OverloadedError("2 workers are busy", 3.6, "router_queue_timeout"),
            OverloadedError("full", 1, "router_queue_full"),
            EngineOverloadedError("full"),
            EngineOverloadedError("full"),
        ):
            dispatcher.refuse = error
            status, body = await door.chat(stream=True)
            assert status == 429
        dispatcher.refuse = OverloadedError("2 workers are busy", 3.6, "router_queue_timeout")
        url = f"{door.url}/v1/completions"
        async with door.session.post(url, json={"model": MODEL, "prompt": "Hi"}) as answer:
            body = await answer.json()
            assert 4 <= int(answer.headers["Retry-After"]) <= 11
        assert body["error"]["code"] == "router_queue_timeout"
        assert body["error"]["message"] == "2 workers are busy"
        text = door.services.metrics.render().decode()
    for reason, count in [("router_queue_timeout", 2), ("router_queue_full", 1),
                          ("workers_busy", 2)]:  # fmt: skip
        line = f'commutator_requests_rejected_total{{model="{MODEL}",reason="{reason}"}} {count}.0'
        assert line in text

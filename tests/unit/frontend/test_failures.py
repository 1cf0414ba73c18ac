"""What the workers do wrong becomes the right status, and leaves nothing running."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

import pytest
from aiohttp import ClientPayloadError
from tests.support.front_door import (
    MODEL,
    FakeDispatch,
    FakeDispatcher,
    FrontDoor,
    answer,
    front_door,
)

from commutator.contract.request import (
    UNKNOWN_CALLER,
    Caller,
    FinishReason,
    GenerateRequest,
    TokenDelta,
)
from commutator.errors import (
    CommutatorError,
    EngineError,
    EngineNeedsPrefillError,
    EngineOverloadedError,
    EngineUnavailableError,
    OverloadedError,
    RequestError,
    RoutingError,
)

FAILURES = [
    (RequestError("no such adapter", "lora_name"), 400, "invalid_value"),
    (OverloadedError("full", retry_after_s=7), 429, "queue_full"),
    (EngineOverloadedError("full"), 429, "workers_busy"),
    (RoutingError("no worker is ready"), 503, "no_worker"),
    (EngineUnavailableError("connection reset by 10.0.0.7"), 503, "worker_lost"),
    (EngineNeedsPrefillError("SGLang at http://10.0.0.7:1"), 503, "no_prefill_worker"),
    (EngineError("CUDA error at /secret/path.py"), 500, "worker_failed"),
    (RuntimeError("a bug in /secret/path.py"), 500, "internal_error"),
]
PAYLOAD = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


def failing_after(count: int, error: Exception) -> FakeDispatcher:
    def script(request: GenerateRequest) -> Sequence[TokenDelta | Exception]:
        return [*answer("one two three four five")(request)[:count], error]

    return FakeDispatcher(script)


async def chat_stream(door: FrontDoor) -> list[str]:
    url = f"{door.url}/v1/chat/completions"
    async with door.session.post(url, json={**PAYLOAD, "stream": True}) as response:
        assert response.status == 200
        return (await response.text()).strip().split("\n\n")


@pytest.mark.parametrize(("error", "status", "code"), FAILURES, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("when", ["dispatch", "first token"])
@pytest.mark.parametrize("streaming", [True, False])
async def test_before_the_first_token(
    error: Exception, status: int, code: str | None, when: str, streaming: bool
) -> None:
    dispatcher = failing_after(0, error)
    if when == "dispatch":
        dispatcher.refuse = error
    async with front_door(dispatcher) as door:
        url = f"{door.url}/v1/chat/completions"
        async with door.session.post(url, json={**PAYLOAD, "stream": streaming}) as response:
            body = await response.json()
    assert (response.status, body["error"]["code"]) == (status, code)
    assert ("Retry-After" in response.headers) == (status in (429, 503))
    if isinstance(error, OverloadedError):
        assert 7 <= int(response.headers["Retry-After"]) <= 21
    assert "secret" not in json.dumps(body)
    assert "10.0.0.7" not in json.dumps(body)
    assert dispatcher.open == 0


@pytest.mark.parametrize(("error", "status", "code"), FAILURES, ids=lambda value: str(value)[:30])
async def test_after_the_first_token(error: Exception, status: int, code: str | None) -> None:
    dispatcher = failing_after(2, error)
    async with front_door(dispatcher) as door:
        events = await chat_stream(door)
        whole, _ = await door.chat()
    assert '"content":" two"' in events[-2]
    last = json.loads(events[-1].removeprefix("data: "))
    assert last["error"]["code"] == code
    assert "[DONE]" not in "".join(events)
    assert whole == status
    assert dispatcher.open == 0


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
async def test_an_engine_that_gives_up(reason: FinishReason) -> None:
    def script(_: GenerateRequest) -> Sequence[TokenDelta | Exception]:
        return [
            TokenDelta(token_ids=(5,)),
            TokenDelta(token_ids=(), finish_reason=reason, error="out of memory"),
        ]

    async with front_door(FakeDispatcher(script)) as door:
        status, body = await door.chat()
    assert (status, body["error"]["code"]) == (500, "worker_failed")


async def test_one_failed_answer_ends_the_others() -> None:
    def script(request: GenerateRequest) -> Sequence[TokenDelta | Exception]:
        deltas = answer("word " * 500)(request)
        return [*deltas[:3], EngineError("no")] if request.request_id.endswith("-1") else deltas

    dispatcher = FakeDispatcher(script, delay_s=0.001)
    async with front_door(dispatcher) as door:
        status, _ = await door.chat(n=4)
        assert status == 500
        assert len(dispatcher.requests) == 4
        assert dispatcher.open == 0


async def test_a_refused_answer_closes_those_already_sent() -> None:
    class Second(FakeDispatcher):
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
            self.refuse = RoutingError("gone") if len(self.requests) == 2 else None
            return await super().dispatch(model, request, caller, sequence_hashes)

    dispatcher = Second(delay_s=0.01)
    async with front_door(dispatcher) as door:
        status, _ = await door.chat(n=4)
    assert (status, dispatcher.open) == (503, 0)


async def test_only_the_unexpected_is_logged_with_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    for error in (RuntimeError("a bug"), EngineError("CUDA")):
        caplog.clear()
        async with front_door(failing_after(0, error)) as door:
            url = f"{door.url}/v1/chat/completions"
            headers = {"X-Request-Id": "my-id"}
            async with door.session.post(url, json=PAYLOAD, headers=headers) as response:
                message = (await response.json())["error"]["message"]
        assert "my-id" in message
        (record,) = [record for record in caplog.records if "my-id" in record.getMessage()]
        assert bool(record.exc_info) == (not isinstance(error, CommutatorError))


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_vanished_client_frees_the_engine_at_once(streaming: bool, n: int) -> None:
    dispatcher = FakeDispatcher(answer("word " * 3000), delay_s=0.002)
    async with front_door(dispatcher) as door:
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            body = json.dumps({**PAYLOAD, "stream": streaming, "n": n}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
            writer.write(head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + body)
            while dispatcher.open < n:
                await asyncio.sleep(0.001)
            if streaming:
                await reader.readuntil(b"data: ")
            writer.transport.abort()
            for _ in range(100):
                if dispatcher.open == 0:
                    break
                await asyncio.sleep(0.005)
            assert dispatcher.open == 0
            assert door.services.limiter.running == 0
        metrics = door.services.metrics.render().decode()
    assert 'code="499",endpoint="/v1/chat/completions",model="smol"} 5.0' in metrics


async def test_a_client_that_vanishes_while_it_waits_leaves_the_queue() -> None:
    dispatcher = FakeDispatcher(answer("word " * 100), delay_s=0.005)
    async with front_door(dispatcher, max_concurrent_requests=1) as door:
        first = asyncio.create_task(door.chat())
        while not dispatcher.open:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(door.chat())
        while not door.services.limiter.waiting:
            await asyncio.sleep(0.001)
        second.cancel()
        while door.services.limiter.waiting:
            await asyncio.sleep(0.001)
        status, _ = await first
    assert status == 200
    assert len(dispatcher.requests) == 1


@pytest.mark.parametrize("streaming", [True, False])
async def test_past_its_deadline(streaming: bool) -> None:
    dispatcher = FakeDispatcher(answer("word " * 300), delay_s=0.01)
    async with front_door(dispatcher, request_timeout_s=0.5) as door:
        if streaming:
            events = await chat_stream(door)
            body = json.loads(events[-1].removeprefix("data: "))
        else:
            status, body = await door.chat()
            assert status == 504
        assert body["error"]["code"] == "deadline_exceeded"
        assert "0.5 s" in body["error"]["message"]
        assert dispatcher.open == 0


@pytest.mark.parametrize(
    ("given", "status"), [("0.05", 504), ("1e9", 200), ("0", 400), ("nan", 400), ("soon", 400)]
)
async def test_the_client_may_lower_the_deadline(given: str, status: int) -> None:
    async with front_door(FakeDispatcher(delay_s=0.03), request_timeout_s=5) as door:
        url = f"{door.url}/v1/chat/completions"
        headers = {"X-Request-Timeout-S": given}
        async with door.session.post(url, json=PAYLOAD, headers=headers) as response:
            assert response.status == status
            if status == 400:
                assert (await response.json())["error"]["param"] == "X-Request-Timeout-S"


async def test_a_slow_body_counts_against_the_deadline() -> None:
    async with front_door(FakeDispatcher(), request_timeout_s=0.1) as door:
        assert b"504" in await door.status_line_for_unfinished_body("/v1/completions")


async def test_beyond_the_queue() -> None:
    dispatcher = FakeDispatcher(answer("word " * 20), delay_s=0.01)
    async with front_door(dispatcher, max_concurrent_requests=2, max_queued_requests=3) as door:
        results = await asyncio.gather(*(door.chat() for _ in range(8)))
        assert sorted(status for status, _ in results) == [200] * 5 + [429] * 3
        refused = next(body for status, body in results if status == 429)
        assert refused["error"]["code"] == "queue_full"
        assert refused["error"]["type"] == "rate_limit_error"
        assert (await door.chat())[0] == 200


async def test_a_worker_that_dies_while_others_stream() -> None:
    """The client sees an error event, not a torn connection."""
    async with front_door(failing_after(3, EngineUnavailableError("lost"))) as door:
        try:
            events = await chat_stream(door)
        except ClientPayloadError:
            pytest.fail("the connection was torn")
    assert "worker_lost" in events[-1]


@pytest.mark.parametrize("n", [1, 3])
async def test_an_answer_that_was_read_whole_succeeded_however_soon_the_client_leaves(
    n: int,
) -> None:
    dispatcher = FakeDispatcher(answer("one two three"), closing_s=0.05)
    async with front_door(dispatcher) as door:
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            body = json.dumps({**PAYLOAD, "stream": True, "n": n}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
            writer.write(head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + body)
            await reader.readuntil(b"data: [DONE]\n\n")
            writer.transport.abort()
        while door.services.limiter.running:
            await asyncio.sleep(0.001)
        metrics = door.services.metrics.render().decode()
    assert 'code="200",endpoint="/v1/chat/completions",model="smol"} 5.0' in metrics
    assert 'code="499"' not in metrics

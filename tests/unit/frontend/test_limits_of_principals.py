"""What a principal is told of its limits, and what each request counts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import openai
import pytest
from attrs import define
from hypothesis import given
from hypothesis import strategies as st
from tests.support.front_door import MODEL, FakeDispatcher, FrontDoor, answer, front_door
from tests.support.principals import gate_of, key_of
from tests.unit.frontend.test_pass_through import MESSAGES, TOOLS, ForwardingDispatcher

from commutator.contract.principal import Limits, Principal
from commutator.errors import OverloadedError, RegistryError
from commutator.frontend.request.failures import RATE_LIMIT_HEADERS, as_duration
from commutator_limits.ledger import UNSTATED_ANSWER_TOKENS, WINDOW_S, Moment
from commutator_limits.limiter import LocalLimiter
from commutator_openai.metering import AnswerUsage, stated_answers

PROMPT_TOKENS = 1  # "Hi"


@define
class Clock:
    now_s: float = 1_000.0

    def __call__(self) -> Moment:
        return Moment(self.now_s, self.now_s)


@asynccontextmanager
async def limited(
    limits: Limits, dispatcher: FakeDispatcher | None = None, clock: Clock | None = None
) -> AsyncIterator[FrontDoor]:
    """A front door for ada, who has ``limits``, and bob, who has none. The client is ada."""
    clock = clock or Clock()
    gate = gate_of(
        Principal(name="ada", limits=limits, permissions=frozenset({"metrics"})),
        Principal(name="bob"),
    )
    async with front_door(dispatcher or FakeDispatcher(), gate=gate) as door:
        door.services.request_limiter = LocalLimiter("frontend-0", clock=clock)
        door.session.headers.update(key_of("ada"))
        yield door


async def headers_of(door: FrontDoor, **body: Any) -> tuple[int, dict[str, str]]:
    sent = {"model": MODEL, "prompt": "Hi", "max_tokens": 10, **body}
    async with door.session.post(f"{door.url}/v1/completions", json=sent) as response:
        await response.read()
        return response.status, {name.lower(): v for name, v in response.headers.items()}


@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_says_what_is_left(stream: bool) -> None:
    async with limited(Limits(requests_per_minute=2, tokens_per_minute=100)) as door:
        status, headers = await headers_of(door, stream=stream)
        assert status == 200
        assert {name: headers[name] for name in RATE_LIMIT_HEADERS} == {
            "x-ratelimit-limit-requests": "2",
            "x-ratelimit-limit-tokens": "100",
            "x-ratelimit-remaining-requests": "1",
            "x-ratelimit-remaining-tokens": str(100 - PROMPT_TOKENS - 10),
            "x-ratelimit-reset-requests": "1m1s",
            "x-ratelimit-reset-tokens": "1m1s",
        }
        # "Hello there!" and its end took fewer tokens than it might have.
        _, headers = await headers_of(door, stream=stream)
        assert headers["x-ratelimit-remaining-requests"] == "0"
        took = 100 - PROMPT_TOKENS - 10 - int(headers["x-ratelimit-remaining-tokens"])
        assert PROMPT_TOKENS < took < PROMPT_TOKENS + 10


async def test_who_has_no_limits_is_told_of_none() -> None:
    async with limited(Limits(requests_per_minute=1)) as door:
        door.session.headers.update(key_of("bob"))
        for _ in range(3):
            status, headers = await headers_of(door)
            assert status == 200
            assert not [name for name in headers if name.startswith("x-ratelimit")]


async def test_a_refusal_is_as_openai_writes_it() -> None:
    clock = Clock()
    async with limited(Limits(requests_per_minute=1), clock=clock) as door:
        assert (await door.complete())[0] == 200
        clock.now_s += 20
        async with door.session.post(
            f"{door.url}/v1/completions", json={"model": MODEL, "prompt": "Hi"}
        ) as refused:
            assert refused.status == 429
            assert refused.headers["Retry-After"] == str(WINDOW_S + 1 - 20)
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            error = (await refused.json())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "1 requests a minute; try again in 41 s" in error["message"]
        clock.now_s += 41
        assert (await door.complete())[0] == 200
        page = (await (await door.session.get(f"{door.url}/metrics")).text()).splitlines()
    assert (
        f'commutator_requests_rejected_total{{model="{MODEL}",reason="rate_limit_exceeded"}} 1.0'
        in (page)
    )


@pytest.mark.security
async def test_a_flood_of_refused_requests_is_not_even_read() -> None:
    async with limited(Limits(requests_per_minute=1)) as door:
        for expected in (200, 429):
            assert (await door.complete())[0] == expected
        async with door.session.post(
            f"{door.url}/v1/completions", data=b"no JSON", headers={"Content-Type": "text/plain"}
        ) as refused:
            assert refused.status == 429  # not 415
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"


async def test_requests_that_wait_in_the_queue_are_concurrent_too() -> None:
    dispatcher = FakeDispatcher(delay_s=0.02)
    async with limited(Limits(concurrent_requests=2), dispatcher) as door:
        answered = await asyncio.gather(*(door.complete() for _ in range(5)))
        assert sorted(status for status, _ in answered) == [200, 200, 429, 429, 429]
        messages = [body["error"]["message"] for status, body in answered if status == 429]
        assert all("2 requests at the same time; wait for one to end" in each for each in messages)
        assert (await door.complete())[0] == 200


async def test_a_request_that_no_worker_takes_costs_nothing() -> None:
    dispatcher = FakeDispatcher(refuse=OverloadedError("full"))
    limits = Limits(requests_per_minute=1, tokens_per_minute=30, concurrent_requests=1)
    async with limited(limits, dispatcher) as door:
        for _ in range(3):
            status, body = await door.complete(max_tokens=20)
            assert (status, body["error"]["code"]) == (429, "queue_full")
        dispatcher.refuse = None
        assert (await door.complete(max_tokens=20))[0] == 200


async def test_an_answer_that_is_cut_off_counts_as_far_as_it_came() -> None:
    dispatcher = FakeDispatcher(answer("one two three four five six"), delay_s=0.05)
    async with limited(Limits(tokens_per_minute=1_000, concurrent_requests=1), dispatcher) as door:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 900, "stream": True}
        async with door.session.post(f"{door.url}/v1/completions", json=body) as stream:
            await stream.content.readline()
        while dispatcher.open:
            await asyncio.sleep(0.005)
        _, headers = await headers_of(door)
        left = int(headers["x-ratelimit-remaining-tokens"])
        assert 1_000 - 2 * (PROMPT_TOKENS + 10) <= left < 1_000 - PROMPT_TOKENS - 11


async def test_without_max_tokens_a_chat_may_be_charged_more_in_the_end() -> None:
    dispatcher = FakeDispatcher(answer("word " * 60))
    async with limited(Limits(tokens_per_minute=40), dispatcher) as door:
        assert (await door.chat())[0] == 200
        status, body = await door.chat()
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert UNSTATED_ANSWER_TOKENS > 40


async def test_without_the_ledger_nobody_with_limits_is_served() -> None:
    class Unreachable(LocalLimiter):
        async def admit(self, *_: Any) -> Any:
            raise RegistryError("the ledger of limits cannot be reached")

    async with limited(Limits(requests_per_minute=5, concurrent_requests=1)) as door:
        door.services.request_limiter = Unreachable("frontend-0")
        for _ in range(2):
            status, body = await door.complete()
            assert (status, body["error"]["code"]) == (503, "limits_unavailable")
        door.session.headers.update(key_of("bob"))
        assert (await door.complete())[0] == 200


@define
class Sleeps:
    """Instead of sleeping, moves the clock of the limits."""

    clock: Clock
    slept_s: list[float]

    async def __call__(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.clock.now_s += seconds


async def test_the_openai_client_waits_as_told_and_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    sleeps = Sleeps(clock, [])
    async with limited(Limits(requests_per_minute=2), clock=clock) as door:
        client = openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="ada", max_retries=2)
        monkeypatch.setattr(anyio, "sleep", sleeps)
        async with client:
            for _ in range(3):
                await client.completions.create(model=MODEL, prompt="Hi")
            raw = await client.completions.with_raw_response.create(model=MODEL, prompt="Hi")
    # A minute's window ends up to a second late: the client is told so when it asks again.
    assert sleeps.slept_s == [60, 1]
    assert raw.headers["x-ratelimit-remaining-requests"] == "0"


async def test_the_openai_client_does_not_repeat_what_never_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    sleeps = Sleeps(clock, [])
    async with limited(Limits(tokens_per_minute=50), clock=clock) as door:
        client = openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="ada", max_retries=2)
        monkeypatch.setattr(anyio, "sleep", sleeps)
        async with client:
            with pytest.raises(openai.RateLimitError, match="shorten it, or state a lower max_tok"):
                await client.completions.create(model=MODEL, prompt="Hi", max_tokens=50)
    assert sleeps.slept_s == []


PASSED_ON = {"messages": MESSAGES, "tools": TOOLS}


async def passed_on(dispatcher: ForwardingDispatcher, **more: Any) -> int:
    """Tokens counted for one request that is passed through and states ``max_tokens`` of 50."""
    async with limited(Limits(tokens_per_minute=1_000), dispatcher) as door:
        body = {"model": MODEL, **PASSED_ON, "max_tokens": 50, **more}
        async with door.session.post(f"{door.url}/v1/chat/completions", json=body) as response:
            await response.read()
            at_first = 1_000 - int(response.headers["x-ratelimit-remaining-tokens"])
            assert at_first > 50
        _, headers = await headers_of(door)
        return 1_000 - PROMPT_TOKENS - 10 - int(headers["x-ratelimit-remaining-tokens"])


async def test_an_engines_own_answer_counts_as_its_usage_says() -> None:
    usage = b'{"usage": {"prompt_tokens": 70, "completion_tokens": 7}}'
    whole = ForwardingDispatcher(content_type="application/json", pieces=[usage[:9], usage[9:]])
    assert await passed_on(whole) == 77
    events = [b'data: {"choices": []}\n\n', b"data: " + usage + b"\n\n", b"data: [DONE]\n\n"]
    assert await passed_on(ForwardingDispatcher(pieces=events), stream=True) == 77


async def test_without_usage_the_events_of_a_stream_count() -> None:
    dispatcher = ForwardingDispatcher(
        block_size=16, pieces=[b"data: {}\n\n", b"data: {}\n\n", b"data: [DONE]\n\n"]
    )
    counted = await passed_on(dispatcher, stream=True)
    prompt, _ = dispatcher.routed_by[0]
    assert counted == len(prompt) + 2


async def test_what_an_engine_refuses_counts_no_tokens() -> None:
    dispatcher = ForwardingDispatcher(content_type="application/json", pieces=[b"{}"])
    dispatcher.code = 422
    assert await passed_on(dispatcher) == 0


def test_usage_of_responses_and_of_text_that_only_mentions_it() -> None:
    usage = AnswerUsage(5, "text/event-stream")
    usage.take(b'data: {"delta": "\\"usage\\""}\ndata: {"x": "usage"\n')
    assert (usage.prompt_tokens, usage.generated_tokens) == (5, 2)
    done = b'{"response": {"usage": {"input_tokens": 9, "output_tokens": 3, '
    usage.take(b"data: " + done + b'"input_tokens_details": {"cached_tokens": 4}}}}\n')
    assert (usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) == (9, 4, 3)
    usage.take(b'data: {"usage": {"prompt_tokens": -1}}\n')
    assert usage.prompt_tokens == 9


def test_the_answers_that_a_request_states() -> None:
    chat = "/v1/chat/completions"
    assert stated_answers("/v1/embeddings", {"max_tokens": 9}) == (1, 0)
    assert stated_answers(chat, {}) == (1, None)
    assert stated_answers(chat, {"n": 3, "max_tokens": 9}) == (3, 9)
    assert stated_answers(chat, {"n": 10**9, "max_tokens": True}) == (256, None)
    assert stated_answers("/v1/responses", {"n": "x", "max_output_tokens": 9}) == (1, 9)


UNITS_S = {"s": 1, "m": 60, "h": 3600}


@given(st.floats(0, 90_000))
def test_a_duration_can_be_read_as_go_reads_it(seconds: float) -> None:
    text = as_duration(seconds)
    parts = re.findall(r"(\d+)(s|m|h)", text)
    assert "".join(number + unit for number, unit in parts) == text
    total_s = sum(int(number) * UNITS_S[unit] for number, unit in parts)
    assert total_s - 1 < seconds <= total_s


def test_durations() -> None:
    shown = [as_duration(s) for s in (0, 0.12, 1.2, 59.9999, 360, 3_607.5)]
    assert shown == ["0s", "1s", "2s", "1m0s", "6m0s", "1h0m8s"]

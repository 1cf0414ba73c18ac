"""Prefill at one real vLLM server and decode at another, by vLLM's own NixlConnector."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from attrs import frozen
from tests.e2e.vllm.cluster import (
    apart_config,
    kill_server,
    metric,
    server_urls,
    wait_for_workers,
)
from tests.support.vllm_server import ask_vllm, key_headers, need_vllm

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.long]

MODEL = "smollm2-135m"
AT_ONCE = 8
ANSWER_TOKENS = 6
CLEAR = 0.01
"""A greedy choice by so much of logprob is the same however the numbers were batched."""
ANIMALS = ("cat", "dog", "horse", "goat", "crow", "whale", "mouse", "bear", "wolf", "seal")
STORY = (
    "lived by the sea with an old fisherman. Every morning they went down to the harbour, counted "
    "the boats and waited for the tide. The people of the village knew them well, and told each "
    "other what the two had found between the stones the day before. One day the"
)


@frozen
class Answer:
    text: str
    apart: dict[str, Any]
    """What the front door says of the hand-over."""
    clear: bool
    """Every token was the first choice by far; only where that was asked for."""


@pytest.fixture(scope="module")
def apart(root: Path) -> Iterator[LocalCluster]:
    need_vllm()
    config = apart_config(root)
    config["disaggregation"] = {
        "kind": "always",
        "timeout_s": 120,
        "router": {"kind": "least_loaded"},
    }
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    with LocalCluster(config, env=env, start_timeout_s=600) as running:
        wait_for_workers(running, 2)
        yield running


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as made:
        yield made


def prompts(name: str, count: int) -> list[str]:
    """Each some 70 tokens, and no whole block of them in common."""
    return [f"{name} {n}: A {ANIMALS[n % len(ANIMALS)]} of {n} years {STORY}" for n in range(count)]


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str,
    *,
    logprobs: int | None = None,
) -> Answer:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": logprobs,
    }
    headers = {"X-Commutator-Explain": "1", **key_headers(url)}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        decision = json.loads(response.headers.get("X-Commutator-Decision", "{}"))
    (choice,) = answer["choices"]
    assert answer["usage"]["completion_tokens"] == ANSWER_TOKENS
    tops = choice["logprobs"]["top_logprobs"] if logprobs else []
    margins = [first - second for first, second, *_ in (sorted(t.values())[::-1] for t in tops)]
    return Answer(
        choice["text"], decision.get("disaggregation", {}), min(margins, default=0) > CLEAR
    )


async def at_once(asked: Iterable[Callable[[], Awaitable[Answer]]]) -> list[Answer]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(ask: Callable[[], Awaitable[Answer]]) -> Answer:
        async with places:
            return await ask()

    return await asyncio.gather(*map(one, asked))


async def aggregated(
    session: aiohttp.ClientSession, cluster: LocalCluster, asked: Sequence[str]
) -> list[Answer]:
    """By one server for itself."""
    url = server_urls(cluster)["prefill-0"]
    return await at_once(partial(complete, session, url, prompt, logprobs=2) for prompt in asked)


def compare(expected: Sequence[Answer], answers: Sequence[Answer]) -> None:
    clear = [(e.text, a.text) for e, a in zip(expected, answers, strict=True) if e.clear]
    print(f"{len(clear)} of {len(expected)} answers are unambiguous")
    assert len(clear) > len(expected) / 2
    assert [one for one, _ in clear] == [other for _, other in clear]


def usage(cluster: LocalCluster) -> dict[str, float]:
    """The share of its KV blocks that each server has in use, by its own metric."""
    return {
        worker: metric(url, "vllm:kv_cache_usage_perc")
        for worker, url in server_urls(cluster).items()
    }


def wait_for_usage(cluster: LocalCluster, expected: dict[str, float]) -> None:
    """Blocks whose hand-over failed stay until vLLM's lease ends, after 30 s."""
    until_s = time.monotonic() + 180
    while (seen := usage(cluster)) != expected:
        assert time.monotonic() < until_s, f"blocks were leaked: {seen}, at first {expected}"
        time.sleep(0.5)


def forget(url: str) -> None:
    """The server's prefix cache is emptied, as soon as no block is in use."""
    until_s = time.monotonic() + 60
    while not json.loads(ask_vllm("POST", f"{url}/reset_prefix_cache"))["success"]:
        assert time.monotonic() < until_s, "blocks are still in use"
        time.sleep(0.2)


async def run(
    session: aiohttp.ClientSession, cluster: LocalCluster, name: str, count: int, rounds: int
) -> None:
    """The decode server forgets each round, so that every prompt is handed over whole.

    The prefill server does not, so that this ends in time on a machine with two cores.
    """
    asked = prompts(name, count)
    expected = await aggregated(session, cluster, asked)
    servers, before = server_urls(cluster), usage(cluster)
    counters = (
        "vllm:nixl_bytes_transferred_count",
        "vllm:nixl_bytes_transferred_sum",
        "vllm:external_prefix_cache_hits_total",
        "vllm:nixl_num_failed_transfers_total",
    )
    at_first = [metric(servers["decode-0"], counter) for counter in counters]
    for _ in range(rounds):
        await asyncio.to_thread(forget, servers["decode-0"])
        answers = await at_once(partial(complete, session, cluster.url, p) for p in asked)
        compare(expected, answers)
        assert {answer.apart["outcome"] for answer in answers} == {"handed over"}
    transfers, size_bytes, tokens, failed = (
        metric(servers["decode-0"], counter) - first
        for counter, first in zip(counters, at_first, strict=True)
    )
    print(f"{transfers:g} transfers, {size_bytes / 1e6:.0f} MB, {tokens:g} tokens")
    # More than that when a busy machine has made a request go on with a second decode leg.
    assert transfers >= count * rounds
    assert failed == 0
    assert tokens >= 64 * count * rounds, "decode computed next to nothing of the prompts"
    assert size_bytes >= tokens * 46_080, "keys and values: 30 layers of 3 heads of 64 floats"
    wait_for_usage(cluster, before)


async def test_handed_over(session: aiohttp.ClientSession, apart: LocalCluster) -> None:
    await run(session, apart, "Tale", 8, 2)


@pytest.mark.proves("vllm", "prefill and decode apart: the right tokens", how="real engine on CPU")
async def test_two_hundred_at_concurrency_8(
    session: aiohttp.ClientSession, apart: LocalCluster
) -> None:
    await run(session, apart, "Story", 50, 4)


@pytest.mark.proves("vllm", "prefill and decode apart: one side killed", how="real engine on CPU")
async def test_prefill_killed_midway(session: aiohttp.ClientSession, apart: LocalCluster) -> None:
    """All is answered, by the decode server alone; a prefill server that is back takes part."""
    asked = prompts("Legend", 40)
    expected, before = await aggregated(session, apart, asked), usage(apart)
    answered = 0

    async def ask(prompt: str) -> Answer:
        nonlocal answered
        answer = await complete(session, apart.url, prompt)
        answered += 1
        if answered == len(asked) // 3:
            await asyncio.to_thread(kill_server, apart, "prefill-0")
        return answer

    answers = await at_once(partial(ask, prompt) for prompt in asked)
    compare(expected, answers)
    handed = sum(answer.apart.get("outcome") == "handed over" for answer in answers)
    print(f"{handed} of {len(asked)} were handed over")
    assert len(asked) // 3 <= handed < len(asked)

    await asyncio.to_thread(wait_for_workers, apart, 2)
    (again,) = prompts("Saga", 1)
    answer = await complete(session, apart.url, again)
    assert answer.apart["outcome"] == "handed over"
    (alone,) = await aggregated(session, apart, [again])
    assert answer.text == alone.text or not alone.clear
    wait_for_usage(apart, before)

"""Real vLLM servers that die or are drained while they answer, and what routing knows after it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import aiohttp
import openai
import pytest
from attrs import frozen
from tests.e2e.vllm.cluster import kill_server, metric, server_urls, wait_for_workers
from tests.support.draining import drain_in_turn
from tests.support.vllm_server import key_headers

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.long]

MODEL = "smollm2-135m"
OURS, THEIRS = 16, 32
"""Tokens in a block of the index, and in one of these servers."""


@frozen
class Told:
    """What the index said before a request, and what the server found."""

    worker: str
    claimed: Mapping[str, int]
    """Tokens of whole blocks of the server's, by worker."""
    cached: int


async def tell(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> Told:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    headers = {"X-Commutator-Explain": "1"}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        decision = json.loads(response.headers["X-Commutator-Decision"])
    most = (len(prompt) - 1) // THEIRS * THEIRS  # the last token is always computed
    claimed = {
        candidate["worker_id"]: min(most, candidate["overlap_blocks"]["device"] * OURS)
        for candidate in decision["candidates"]
    }
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Told(decision["worker_id"], claimed, cached)


async def ask_server(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> int:
    """The tokens that the server itself finds; it holds the whole prompt from then on."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    path, key = f"{url}/v1/completions", key_headers(url)
    async with session.post(path, json=body, headers=key) as response:
        answer = await response.json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def until_claimed(
    session: aiohttp.ClientSession, url: str, prompt: list[int], worker: str, tokens: int
) -> None:
    """The events have come."""
    async with asyncio.timeout(120):
        while (await tell(session, url, prompt)).claimed[worker] != tokens:
            await asyncio.sleep(0.1)


def answer_with_a_kill(pair: LocalCluster, client: openai.OpenAI, prompt: str) -> tuple[str, str]:
    """The text of a stream whose server is killed after a few tokens, and which it was."""
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt=prompt, temperature=0, max_tokens=60, stream=True
    ) as response:
        worker = response.headers["X-Commutator-Worker"]
        pieces = []
        for number, chunk in enumerate(response.parse()):
            pieces.append(chunk.choices[0].text if chunk.choices else "")
            if number == 5:
                kill_server(pair, worker)
    return "".join(pieces), worker


@pytest.mark.proves(
    "vllm", "a worker killed: its answers go on elsewhere", how="real engine on CPU"
)
async def test_killed_while_it_answers(pair: LocalCluster, client: openai.OpenAI) -> None:
    """The stream goes on at the other server; the index forgets what the lost one held."""
    story = "Once upon a time, in a small village by the sea,"
    whole = client.completions.create(model=MODEL, prompt=story, temperature=0, max_tokens=60)
    prompts = [[number * 100 + i for i in range(130)] for number in range(1, 7)]
    async with aiohttp.ClientSession() as session:
        for prompt in prompts:
            for url in server_urls(pair).values():
                await ask_server(session, url, prompt)
            for worker in server_urls(pair):
                await until_claimed(session, pair.url, prompt, worker, 128)

        text, lost = await asyncio.to_thread(answer_with_a_kill, pair, client, story)
        assert text == whole.choices[0].text
        (other,) = server_urls(pair).keys() - {lost}
        await asyncio.to_thread(wait_for_workers, pair, 2)

        url = server_urls(pair)[lost]
        for number, prompt in enumerate(prompts):
            told = await tell(session, pair.url, prompt)
            assert told.claimed == {lost: 0, other: 128}
            assert (told.worker, told.cached) == (other, 128)
            if number % 2:
                assert await ask_server(session, url, prompt) == 0
                await until_claimed(session, pair.url, prompt, lost, 128)
                assert await ask_server(session, url, prompt) == 128


@pytest.mark.proves("vllm", "a worker drained: nothing fails", how="real engine on CPU")
async def test_drained_under_traffic(pair: LocalCluster) -> None:
    """Nothing fails, the drained server rests, and afterwards it serves again."""

    async def work(worker: str) -> float:
        """The prompt tokens that it has been given, once it computes nothing."""
        server = server_urls(pair)[worker]
        while await asyncio.to_thread(metric, server, "vllm:num_requests_running"):
            await asyncio.sleep(0.1)
        return await asyncio.to_thread(metric, server, "vllm:prompt_tokens_total")

    served = await drain_in_turn(
        pair.url, MODEL, ("vllm-0", "vllm-1"), work, clients=6, new_tokens=16
    )
    print(f"streams: {dict(served)}, 0 failed")

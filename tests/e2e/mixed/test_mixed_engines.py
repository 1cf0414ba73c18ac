"""examples/mixed.yaml: our engine, vLLM and SGLang serve one model; each is lost once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from attrs import frozen
from tests.support.launched_servers import kill_servers_of, wait_for_workers
from tests.support.sglang_server import need_sglang
from tests.support.vllm_server import need_vllm

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.sglang, pytest.mark.long]

MODEL = "smollm2-135m"
NUMBERS = "Numbers: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,"
"""The model goes on counting; no other token is ever near."""
SENTENCE = "The tide comes in twice a day, and the boats wait for it in the harbour. "
DOCUMENT = SENTENCE * 12
PROGRAMS = {
    "reference-0": "commutator_reference",
    "vllm-0": "vllm.entrypoints.openai.api_server",
    "sglang-0": "sglang.launch_server",
}
START_S = 1500.0
OURS, LARGEST = 16, 32
"""Tokens in a block of the index, and in the largest block that a server has."""


@frozen
class Answer:
    worker: str
    text: str
    claimed: dict[str, int]
    """Tokens that the index knew of before, by worker."""
    prompt_tokens: int
    cached: int


@pytest.fixture(scope="module")
def mixed(root: Path) -> Iterator[LocalCluster]:
    need_vllm()
    need_sglang()
    patient = ["runtime.lease_s=60"]  # a busy machine makes no worker a lost one
    patient += [f"engines[{n}].start_timeout_s={START_S:g}" for n in range(len(PROGRAMS))]
    with LocalCluster(
        root / "examples" / "mixed.yaml",
        arguments=[word for setting in patient for word in ("--set", setting)],
        start_timeout_s=START_S,
    ) as running:
        yield running


@pytest_asyncio.fixture
async def session(mixed: LocalCluster) -> AsyncIterator[aiohttp.ClientSession]:
    """All three are ready: the test before may have killed some."""
    await asyncio.to_thread(wait_for_workers, mixed, len(PROGRAMS), START_S)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as made:
        yield made


def asking(prompt: str, salt: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "cache_salt": salt,
    }


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: str, salt: str, max_tokens: int
) -> Answer:
    body, headers = asking(prompt, salt, max_tokens), {"X-Commutator-Explain": "1"}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        decision = json.loads(response.headers["X-Commutator-Decision"])
    return Answer(
        decision["worker_id"],
        answer["choices"][0]["text"],
        {c["worker_id"]: c["overlap_blocks"]["device"] * OURS for c in decision["candidates"]},
        answer["usage"]["prompt_tokens"],
        answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


@pytest.mark.proves("reference", "several engines behind one front door", how="real engine on CPU")
@pytest.mark.proves("vllm", "several engines behind one front door", how="real engine on CPU")
@pytest.mark.proves("sglang", "several engines behind one front door", how="real engine on CPU")
async def test_a_prefix_is_found_again_at_whichever_engine_has_it(
    session: aiohttp.ClientSession, mixed: LocalCluster
) -> None:
    """Requests at once are spread over the engines; each conversation goes on where it began."""
    begun: dict[str, str] = {}
    for round_ in range(20):
        salts = [f"tenant {round_} {number}" for number in range(6)]
        answers = await asyncio.gather(
            *(ask(session, mixed.url, DOCUMENT, salt, 4) for salt in salts)
        )
        assert len({answer.text for answer in answers}) == 1
        begun |= {answer.worker: salt for salt, answer in zip(salts, answers, strict=True)}
        if begun.keys() == PROGRAMS.keys():
            break
    assert begun.keys() == PROGRAMS.keys()
    for worker, salt in begun.items():
        async with asyncio.timeout(120):  # until its KV events have come
            while (await ask(session, mixed.url, SENTENCE * 2, salt, 1)).claimed[worker] < LARGEST:
                await asyncio.sleep(0.1)
        again = await ask(session, mixed.url, DOCUMENT, salt, 1)
        assert again.worker == worker
        assert again.cached >= (again.prompt_tokens - 1) // LARGEST * LARGEST


async def test_each_may_be_lost_in_the_middle_of_an_answer(
    session: aiohttp.ClientSession, mixed: LocalCluster
) -> None:
    """The same text comes, from the other engines, and the lost one takes part again."""
    whole = (await ask(session, mixed.url, NUMBERS, "whole", 60)).text
    lost: set[str] = set()
    for number in range(100):
        migrations = await migrated(session, mixed.url)
        text, worker = await answer_with_a_kill(session, mixed, f"{number}", lost)
        if worker in lost:
            continue
        assert text == whole, worker
        if await migrated(session, mixed.url) > migrations:  # otherwise it had ended before
            lost.add(worker)
        await asyncio.to_thread(wait_for_workers, mixed, len(PROGRAMS), START_S)
        if lost == PROGRAMS.keys():
            break
    assert lost == PROGRAMS.keys()


async def answer_with_a_kill(
    session: aiohttp.ClientSession, cluster: LocalCluster, salt: str, spared: set[str]
) -> tuple[str, str]:
    """The text of a stream whose server is killed after a few tokens, and which it was."""
    body = {**asking(NUMBERS, salt, 60), "stream": True}
    pieces: list[str] = []
    async with session.post(f"{cluster.url}/v1/completions", json=body) as response:
        assert response.status == 200
        worker = response.headers["X-Commutator-Worker"]
        if worker in spared:
            return "", worker
        async for line in response.content:
            if line.startswith(b"data: {"):
                choices = json.loads(line[len(b"data: ") :])["choices"]
                pieces += [choice["text"] for choice in choices]
                if len(pieces) == 3:
                    await asyncio.to_thread(kill_servers_of, cluster, PROGRAMS[worker])
    return "".join(pieces), worker


async def migrated(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(f"{url}/metrics") as response:
        page = await response.text()
    counts = re.findall(r"^commutator_migrations_total\S* (\S+)", page, re.MULTILINE)
    return sum(map(float, counts))

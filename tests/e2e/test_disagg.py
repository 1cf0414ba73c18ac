"""Greedy answers are the same whether prefill and decode are at one worker or at two."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from attrs import frozen
from click.testing import CliRunner
from tests.e2e.identity_prompts import PARAGRAPH, PROMPTS
from tests.support.oracle import SOURCE

from commutator.cli.main import main
from commutator.contract.worker import TransferStatistics
from commutator.engine.client import TokenApiClient
from commutator.tokenizer.load import load_text_model
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 4
DEPLOYMENT: dict[str, Any] = {
    "models": [{"name": "m", "source": SOURCE, "max_model_len": 4096}],
    "engines": [
        # Long prompts take several steps, at either worker.
        {"kind": "reference", "name": "p", "role": "prefill", "max_tokens_per_step": 256},
        {
            "kind": "reference",
            "name": "d",
            "role": "decode",
            "replicas": 2,
            "max_tokens_per_step": 192,
            # Little more than one long prompt: blocks go to the tier, and come back from it.
            "kv_cache_bytes": 200 << 20,
        },
    ],
    "tiers": [{"kind": "dram", "capacity": "300MB", "huge_pages": "off"}],
    "router": {"kind": "kv"},
    "disaggregation": {"kind": "always", "timeout_s": 600},
    "frontend": {"request_timeout_s": 1200},
}


@frozen
class Answered:
    text: str
    cached_tokens: int
    apart: dict[str, Any]


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], salt: str
) -> Answered:
    body = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
    }
    headers = {"X-Commutator-Explain": "1"}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        decision = json.loads(response.headers["X-Commutator-Decision"])
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 8)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answered(answer["choices"][0]["text"], cached, decision.get("disaggregation", {}))


async def answers(url: str, prompts: Sequence[Sequence[int]], salt: str) -> list[Answered]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: Sequence[int]) -> Answered:
        async with places:
            return await ask(session, url, prompt, salt)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1200)) as session:
        return await asyncio.gather(*map(one, prompts))


async def command(cluster: LocalCluster, *arguments: str) -> None:
    argv = ["worker", *arguments, "--url", cluster.url]
    done = await asyncio.to_thread(CliRunner().invoke, main, argv)
    assert done.exit_code == 0, done.output


async def until_known(cluster: LocalCluster, workers: int) -> None:
    """The front door has heard of all of them."""
    async with asyncio.timeout(60):
        while [w["state"] for w in cluster.health()["workers"]] != ["ready"] * workers:
            await asyncio.sleep(0.05)


async def until_idle(cluster: LocalCluster) -> None:
    """No request, export, lease or reserved block is left at any worker."""
    for worker in cluster.health()["workers"]:
        client = TokenApiClient(worker["admin_address"], answer_timeout_s=60)
        async with asyncio.timeout(60):
            while (load := await client.load()).running or load.waiting or load.kv_used_blocks:
                await asyncio.sleep(0.1)
        await client.close()


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Every other begins like others, so that there are prefix hits at both workers."""
    text = load_text_model(SOURCE)
    shared = text.encode(PARAGRAPH * 4)
    made = []
    for number, length in enumerate(lengths):
        own = text.encode(f"{number}. {PROMPTS[number % len(PROMPTS)]}\n")
        filling = text.encode(f" Chapter {number}. {PARAGRAPH}")
        begun = shared[: length // 2] + own if number % 2 else own
        made.append((begun + filling * (length // len(filling) + 1))[:length])
    return made


async def compare(lengths: Sequence[int]) -> None:
    asked = prompts(lengths)
    with LocalCluster(DEPLOYMENT, start_timeout_s=300) as cluster:
        await until_known(cluster, 3)
        await command(cluster, "drain", "p-0")
        whole = await answers(cluster.url, asked, "whole")
        assert not any(answer.apart for answer in whole)
        await command(cluster, "undrain", "p-0")
        apart = await answers(cluster.url, asked, "apart")
        again = await answers(cluster.url, asked[::-1], "apart")
        for one, other, third in zip(whole, apart, again[::-1], strict=True):
            assert one.text == other.text == third.text
        separate = [answer.apart for answer in apart if answer.apart["separate"]]
        # Where other tests want the CPUs, too, a hand-over may be given up; its prompt is computed.
        given_up = [one for one in separate if one["failed"]]
        reasons = [failed["reason"] for one in given_up for failed in one["failed"]]
        assert [reason for reason in reasons if "no answer within" not in reason] == []
        assert {one["outcome"] for one in separate if not one["failed"]} == {"handed over"}
        assert len(separate) > len(lengths) / 2
        assert any(answer.cached_tokens for answer in apart), "common beginnings are found"
        assert sum(answer.cached_tokens for answer in again) > sum(lengths) / 2
        await until_idle(cluster)
        pulled = [counts.pulls for counts in await handovers(cluster)]
        assert sum(each.nixl_bytes for each in pulled) == sum(each.pulled_bytes for each in pulled)
        used = [each.nixl_bytes for each in pulled]
        assert all(used) or (given_up and any(used)), "NIXL's own count, at both decode workers"


async def handovers(cluster: LocalCluster) -> list[TransferStatistics]:
    """What each decode worker counted."""
    counted = []
    for worker in cluster.health()["workers"]:
        if worker["role"] == "decode":
            client = TokenApiClient(worker["admin_address"], answer_timeout_s=60)
            counted.append(await client.handover_statistics())
            await client.close()
    return counted


@pytest.mark.proves(
    "reference", "prefill and decode apart: the right tokens", how="real engine on CPU"
)
async def test_answers_are_the_same() -> None:
    await compare([20, 40, 90, 150, 210, 300, 420, 600])


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_fifty_prompts_from_20_to_3000_tokens() -> None:
    await compare([round(20 * 150 ** (number / 49)) for number in range(50)])


@pytest.mark.long
async def test_the_example_separates_long_prompts_only() -> None:
    with LocalCluster(ROOT / "examples" / "disagg.yaml", start_timeout_s=300) as cluster:
        await until_known(cluster, 3)
        async with aiohttp.ClientSession() as session:
            body = {"model": "smollm2-135m", "max_tokens": 4, "prompt": PARAGRAPH * 8}
            headers = {"X-Commutator-Explain": "1"}
            reasons = []
            for prompt in ("Once upon a time", PARAGRAPH * 8, PARAGRAPH * 8):
                body["prompt"] = prompt
                url = f"{cluster.url}/v1/completions"
                async with session.post(url, json=body, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    decision = json.loads(response.headers["X-Commutator-Decision"])
                reasons.append(decision["disaggregation"]["reason"])
            async with session.get(f"{cluster.url}/metrics") as response:
                scraped = await response.text()
        assert reasons[:2] == ["short prompt", "long prompt"]
        said = 'commutator_handover_legs_total{leg="decode",model="smollm2-135m",outcome="done"}'
        assert f"{said} " in scraped
        await until_idle(cluster)

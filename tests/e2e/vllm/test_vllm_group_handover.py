"""Prefill and decode apart, on real vLLM servers of models with several kinds of KV.

Windows hand over their last blocks, recurrent layers one state. Answers are as close to those of
one server for itself as this server's own, of prompts computed in other pieces, are to them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from attrs import frozen
from tests.e2e.test_disagg import command
from tests.e2e.vllm.cluster import (
    apart_config,
    kill_server,
    metric,
    server_urls,
    wait_for_workers,
)
from tests.e2e.vllm.test_vllm_disagg import forget
from tests.support.tiny_models import FAMILIES, VOCABULARY, make_tiny_model
from tests.support.vllm_server import key_headers, need_vllm

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.long]

_ANSWER_TOKENS = 16
_NEAR = 5
_LOCAL_TOKENS = 100
"""Shorter prompts are not handed over by the policy `conditional`."""
_POLICIES: dict[str, dict[str, Any]] = {
    "always": {"kind": "always"},
    "conditional": {"kind": "conditional", "max_local_prefill_length": _LOCAL_TOKENS},
}
_WINDOWS = (40, 63, 64, 65, 96, 130, 321, 700, 1500)
_LENGTHS = {
    "gemma3": _WINDOWS,
    "gpt_oss": _WINDOWS,
    "llama4": (40, 127, 128, 129, 160, 257, 640, 1500),
    "qwen3_next": (100, 543, 544, 545, 546, 700, 1088, 1089, 1700),
    "mixtral": (40, 65, 700),
}
_BLOCK_TOKENS = 32
_STATE_TOKENS = 544
"""From one state that the tiny Qwen3-Next keeps to the next."""


@frozen
class Answer:
    tokens: tuple[str, ...]
    near: tuple[dict[str, float], ...]
    apart: dict[str, Any]
    """What the front door says of the hand-over."""


@pytest.fixture(
    scope="module",
    params=[
        ("gemma3", "always"),
        ("gemma3", "conditional"),
        ("gpt_oss", "always"),
        ("llama4", "always"),
        ("qwen3_next", "always"),
        ("qwen3_next", "conditional"),
        ("mixtral", "always"),
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    family, policy = request.param
    return family, policy


@pytest.fixture(scope="module")
def apart(
    case: tuple[str, str], root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    need_vllm()
    family, policy = case
    folder = make_tiny_model(family, tmp_path_factory.getbasetemp() / "tiny")
    config = apart_config(root)
    config["models"] = [{"name": "tiny", "source": str(folder), "max_model_len": 4096}]
    for server in config["engines"]:
        server["args"] = [
            f"--dtype={FAMILIES[family].dtype}",
            "--enforce-eager",
            f"--block-size={_BLOCK_TOKENS}",
            f"--kv-cache-memory-bytes={64 << 20}",
            "--max-num-batched-tokens=256",
            "--generation-config=vllm",
        ]
    config["disaggregation"] = {
        **_POLICIES[policy],
        "timeout_s": 120,
        "router": {"kind": "least_loaded"},
    }
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    with LocalCluster(config, env=env, start_timeout_s=600) as running:
        wait_for_workers(running, 2)
        yield running


def made_prompts(family: str, seed: int) -> list[list[int]]:
    random = Random(seed)
    return [
        [random.randrange(100, VOCABULARY) for _ in range(length)] for length in _LENGTHS[family]
    ]


async def complete(session: aiohttp.ClientSession, url: str, prompt: Sequence[int]) -> Answer:
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": _NEAR,
    }
    headers = {"X-Commutator-Explain": "1", **key_headers(url)}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        decision = json.loads(response.headers.get("X-Commutator-Decision", "{}"))
    said = answer["choices"][0]["logprobs"]
    return Answer(
        tuple(said["tokens"]), tuple(said["top_logprobs"]), decision.get("disaggregation", {})
    )


def distance(one: Answer, other: Answer) -> float:
    """The largest difference of a log probability of the tokens, up to where the answers part.

    There, how much less likely each thinks the other's token.
    """
    largest, nowhere = 0.0, float("-inf")
    assert len(one.tokens) == len(other.tokens) == _ANSWER_TOKENS
    for here, there, near, far in zip(one.tokens, other.tokens, one.near, other.near, strict=True):
        if here != there:
            lost = near[here] - near.get(there, nowhere), far[there] - far.get(here, nowhere)
            return max(largest, *lost)
        largest = max(largest, abs(near[here] - far[here]))
    return largest


async def whole(
    session: aiohttp.ClientSession, cluster: LocalCluster, asked: Sequence[Sequence[int]]
) -> tuple[list[Answer], float]:
    """Answers of one server for itself, and how far they are from those it gives to all at once.

    Then a step's budget is shared, so that prompts are computed in other pieces, as they are where
    the last token of a prompt is computed by the decode server.
    """
    await command(cluster, "drain", "prefill-0")
    first = [await complete(session, cluster.url, prompt) for prompt in asked]
    again = await asyncio.gather(*(complete(session, cluster.url, prompt) for prompt in asked))
    assert not any(answer.apart.get("outcome") == "handed over" for answer in first)
    await command(cluster, "undrain", "prefill-0")
    for url in server_urls(cluster).values():
        await asyncio.to_thread(forget, url)
    return first, max(distance(one, other) for one, other in zip(first, again, strict=True))


async def test_answers_are_the_same(apart: LocalCluster, case: tuple[str, str]) -> None:
    family, policy = case
    asked = made_prompts(family, 1)
    decode = server_urls(apart)["decode-0"]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        expected, noise = await whole(session, apart, asked)
        counters = ("bytes_transferred_sum", "num_failed_transfers_total")
        before = [metric(decode, f"vllm:nixl_{name}") for name in counters]
        answers = [await complete(session, apart.url, prompt) for prompt in asked]
    size_bytes, failed = (
        metric(decode, f"vllm:nixl_{name}") - old
        for name, old in zip(counters, before, strict=True)
    )
    far = [distance(one, other) for one, other in zip(expected, answers, strict=True)]
    print(
        f"{family} {policy}: {size_bytes / 1e6:.2f} MB, noise {noise:.2g}, farthest {max(far):.2g}"
    )
    if family != "qwen3_next":
        assert max(far) <= 2 * noise + 1e-4, dict(zip(map(len, asked), far, strict=True))
    else:
        # Where the engine itself cuts the prompt nothing may differ. Elsewhere the prefill server
        # cuts it before its last token, as one server for itself never does, in bfloat16.
        cut = {len(prompt): one for prompt, one in zip(asked, far, strict=True)}
        assert max(one for length, one in cut.items() if length % _STATE_TOKENS == 1) <= 1e-4
    assert failed == 0
    handed = [
        prompt
        for prompt, answer in zip(asked, answers, strict=True)
        if answer.apart.get("outcome") == "handed over"
    ]
    long = [prompt for prompt in asked if policy == "always" or len(prompt) > _LOCAL_TOKENS]
    assert handed == long
    if family == "gemma3":
        # One full and five sliding layers, each with one head of 32 keys and 32 values in float32.
        block_bytes = _BLOCK_TOKENS * 2 * 32 * 4
        most_blocks = sum(
            blocks + 5 * min(blocks, 64 // _BLOCK_TOKENS + 1)
            for blocks in (-(-len(prompt) // _BLOCK_TOKENS) for prompt in handed)
        )
        assert 0 < size_bytes <= most_blocks * block_bytes


async def test_one_side_killed(apart: LocalCluster, case: tuple[str, str]) -> None:
    """What a dead prefill server does not hand over is computed; the answers are equal.

    Of Qwen3-Next, which in bfloat16 answers otherwise when prompts are cut otherwise, only that all
    are whole.
    """
    family, policy = case
    if policy != "always":
        pytest.skip("one policy is enough")
    asked = made_prompts(family, 2)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        expected, noise = await whole(session, apart, asked)

        async def kill() -> None:
            await asyncio.sleep(0.3)
            await asyncio.to_thread(kill_server, apart, "prefill-0")

        tasks = [complete(session, apart.url, prompt) for prompt in asked]
        killing = asyncio.create_task(kill())
        answers = await asyncio.gather(*tasks)
        await killing
    far = [distance(one, other) for one, other in zip(expected, answers, strict=True)]
    if family != "qwen3_next":
        assert max(far) <= 2 * noise + 1e-4, dict(zip(map(len, asked), far, strict=True))

"""KV-aware routing with real tokens: what the engines themselves report as cached."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest
import yaml
from openai.types.chat import ChatCompletionMessageParam as Message
from tests.e2e.conftest import MODEL

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.long

SYSTEM = "You are a patient guide who answers in a few plain words. " * 12


async def ask(client: openai.AsyncOpenAI, messages: list[Message]) -> tuple[str, int]:
    """The answer, and how many of its prompt's tokens were cached."""
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=12
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    return answer.choices[0].message.content or "", cached


async def measure(root: Path, policy: str, replicas: int = 2) -> int:
    """Tokens found in a cache over a ten-turn conversation and eight users of one prompt."""
    cached = 0
    config = yaml.safe_load((root / "examples" / "kv.yaml").read_text())
    config["router"] = {"kind": policy}
    config["engines"][0]["replicas"] = replicas
    with LocalCluster(config) as cluster:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
            history: list[Message] = [{"role": "system", "content": SYSTEM}]
            for turn in range(10):
                history.append({"role": "user", "content": f"Tell me fact number {turn}."})
                text, hit = await ask(client, history)
                history.append({"role": "assistant", "content": text})
                cached += hit
                await asyncio.sleep(0.2)  # events need a moment; so does a person
            for user in range(8):
                question: list[Message] = [
                    {"role": "system", "content": "Shared. " + SYSTEM},
                    {"role": "user", "content": f"I am user {user}. Greet me."},
                ]
                cached += (await ask(client, question))[1]
                await asyncio.sleep(0.2)
    return cached


@pytest.mark.proves(
    "reference", "routing by prefix finds what can be found", how="real engine on CPU"
)
async def test_kv_finds_what_round_robin_misses(root: Path) -> None:
    """What is possible is what a single worker finds, which sees every request."""
    possible = await measure(root, "kv", replicas=1)
    kv = await measure(root, "kv")
    turns = await measure(root, "round_robin")
    print(f"cached of {possible} possible: kv {kv / possible:.1%}, "
          f"round_robin {turns / possible:.1%}")  # fmt: skip
    assert kv >= 0.9 * possible
    assert kv > turns

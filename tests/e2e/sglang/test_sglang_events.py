"""The prefix index is what a real SGLang server holds, by its own KV events."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from attrs import define, field
from tests.support.sglang_server import SglangServer, ask_sglang

from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.routing import RouterConfig, WorkerRank
from commutator.contract.worker import WorkerRecord
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.index import PrefixIndex
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator_sglang.client import SglangClient
from commutator_testing.engines import collect, make_request

pytestmark = [pytest.mark.sglang, pytest.mark.long]

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
BLOCK = 16
"""Ours, and the server's pages."""


@define
class Watched:
    """A server, and the index that its events fill."""

    client: SglangClient
    url: str
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
        return min(tokens, (len(prompt) - 1) // BLOCK * BLOCK)

    async def up_to_date(self) -> None:
        """Events come in order: once a new block's has come, all before it have."""
        marker = [30_000 + next(self.numbers)] * BLOCK
        (first, *_) = sequence_hashes(marker, BLOCK)
        await collect(self.client, make_request("marker", marker, ONE_TOKEN))
        async with asyncio.timeout(120):
            while not self.index.holds("w", first):
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture
async def watched(sglang: SglangServer) -> AsyncIterator[Watched]:
    client = SglangClient(sglang.url)
    info = await client.start()
    assert info.block_size == BLOCK
    ask_sglang("POST", f"{sglang.url}/flush_cache?timeout=60")
    indexer = KvIndexer(RouterConfig(kind="kv", block_size=BLOCK))
    await indexer.add(
        WorkerRecord(
            worker_id="w", engine="e", kind="fake", model="m", address="127.0.0.1:1", info=info
        )
    )
    yield Watched(client, sglang.url, indexer.index)
    await indexer.close()
    await client.close()


@pytest.mark.proves(
    "sglang", "KV events: the index is what the server holds", how="real engine on CPU"
)
async def test_after_a_flush(watched: Watched) -> None:
    prompt = list(range(500, 600))
    await watched.cached(prompt)
    assert await watched.expected(prompt) > 0
    ask_sglang("POST", f"{watched.url}/flush_cache?timeout=60")
    assert await watched.expected(prompt) == 0
    assert await watched.cached(prompt) == 0
    expected = await watched.expected(prompt)
    assert expected == (len(prompt) - 1) // BLOCK * BLOCK
    assert await watched.cached(prompt) == expected


async def test_a_salted_prompt_is_its_tenants_own(watched: Watched) -> None:
    prompt = list(range(900, 980))
    await watched.cached(prompt, "tenant-1")
    assert await watched.expected(prompt, "tenant-1") > 0
    for salt in (None, "tenant-2"):
        assert await watched.expected(prompt, salt) == 0
        assert await watched.cached(prompt, salt) == 0


async def test_generated_tokens_are_found_as_well(watched: Watched) -> None:
    prompt = list(range(2000, 2030))
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    deltas = await collect(watched.client, make_request("a", prompt, sampling))
    answer = [token for delta in deltas for token in delta.token_ids]
    whole = [*prompt, *answer, 7]
    expected = await watched.expected(whole)
    assert expected == 48
    assert await watched.cached(whole) == expected


async def test_after_a_restart(watched: Watched, sglang: SglangServer) -> None:
    """Another process publishes from the beginning: nothing of the old one is believed."""
    prompt = list(range(3000, 3100))
    await watched.cached(prompt)
    assert await watched.expected(prompt) == 96
    await asyncio.to_thread(sglang.restart)
    await watched.client.start()  # as routing asks before each request
    assert await watched.expected(prompt) == 0
    assert await watched.cached(prompt) == 0
    assert await watched.expected(prompt) == 96

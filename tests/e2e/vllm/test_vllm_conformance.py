"""A real vLLM server passes the shipped suite, compared with transformers on the same weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache

import pytest
from tests.e2e.vllm.cluster import CONNECTION, engine_client, server_urls
from tests.support.oracle import SOURCE, greedy
from tests.support.vllm_server import ask_vllm

from commutator.contract.engine import EngineClient
from commutator.tokenizer.load import load_text_model
from commutator_scaffold.local_cluster import LocalCluster
from commutator_testing.engines import EngineContract
from commutator_vllm.client import VllmClient
from commutator_vllm.messages import COMPLETIONS

pytestmark = [pytest.mark.vllm, pytest.mark.long]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In 1969, the first human being walked on the",
    "Once upon a time, in a small village by the sea, there lived",
)


@cache
def expected() -> tuple[tuple[list[int], list[int]], ...]:
    """Greedy continuations by transformers, from the GGUF file itself."""
    text = load_text_model(SOURCE)
    prompts = [text.encode(prompt) for prompt in PROMPTS]
    return tuple((ids, greedy(ids, 16)) for ids in prompts)


@pytest.mark.proves("vllm", "engine conformance suite", how="real engine on CPU")
class TestVllm(EngineContract):
    """Starting a server takes half a minute, so all tests share one, with its cache emptied."""

    capabilities = frozenset({"sampling", "stop_tokens", "logprobs", "prefix_cache"})

    @pytest.fixture(autouse=True)
    def _server(self, pair: LocalCluster) -> None:
        self.cluster = pair
        self.url = server_urls(pair)["vllm-1"]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EngineClient]:
        ask_vllm("POST", f"{self.url}/reset_prefix_cache")
        yield self.new_client()

    def another_client(self, client: EngineClient) -> EngineClient:
        return self.new_client()

    def new_client(self) -> EngineClient:
        return engine_client(self.cluster, "vllm-1")

    def golden(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        return expected()


@pytest.mark.skipif(CONNECTION != "http", reason="the token API has no such endpoint")
class TestVllmCompletions(TestVllm):
    """The same over /v1/completions, as with servers that do not offer the token endpoint."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EngineClient]:
        ask_vllm("POST", f"{self.url}/reset_prefix_cache")
        yield self.another_client(self.new_client())

    def another_client(self, client: EngineClient) -> EngineClient:
        other = self.new_client()
        assert isinstance(other, VllmClient)
        other.path = COMPLETIONS
        return other

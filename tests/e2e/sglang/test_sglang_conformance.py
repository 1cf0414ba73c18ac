"""A real SGLang server passes the shipped suite, compared with transformers on the same weights."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache

import pytest
from tests.support.oracle import SOURCE, greedy
from tests.support.sglang_server import SglangServer, ask_sglang

from commutator.contract.engine import EngineClient
from commutator.contract.request import SamplingParams
from commutator.errors import RequestError
from commutator.tokenizer.load import load_text_model
from commutator_sglang.client import SglangClient
from commutator_testing.engines import EngineContract, collect, make_request

pytestmark = [pytest.mark.sglang, pytest.mark.long]

SIX_TOKENS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
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


@pytest.mark.proves("sglang", "engine conformance suite", how="real engine on CPU")
class TestSglang(EngineContract):
    """Starting a server takes half a minute, so all tests share one, with its cache emptied.

    Without an accelerator SGLang draws without seeds, so ``sampling`` is not claimed.
    """

    capabilities = frozenset({"stop_tokens", "logprobs", "prefix_cache"})

    @pytest.fixture(autouse=True)
    def _server(self, sglang: SglangServer) -> None:
        self.url = sglang.url

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EngineClient]:
        ask_sglang("POST", f"{self.url}/flush_cache?timeout=60")
        yield SglangClient(self.url)

    def another_client(self, client: EngineClient) -> EngineClient:
        return SglangClient(self.url)

    def golden(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        return expected()

    async def test_a_seed_that_would_be_ignored_is_refused(self, client: EngineClient) -> None:
        request = make_request("s", [5, 6, 7], SamplingParams(temperature=1.0, seed=3))
        with pytest.raises(RequestError, match="enable-deterministic-inference"):
            await collect(client, request)

    async def test_the_ids_that_sglang_gives_when_asked_directly(
        self, client: EngineClient
    ) -> None:
        for prompt in (list(range(first, first + 20)) for first in (300, 5000, 20000)):
            sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling}
            told = ask_sglang("POST", f"{self.url}/generate", json.dumps(body).encode())
            deltas = await collect(client, make_request("a", prompt, SIX_TOKENS))
            ids = [token for delta in deltas for token in delta.token_ids]
            assert ids == json.loads(told)["output_ids"]

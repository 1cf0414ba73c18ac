"""The reference engine passes the shipped suite, compared with transformers on the same weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import ClassVar
from unittest.mock import patch

import pytest
from tests.support.oracle import SOURCE, greedy

from commutator.contract.disagg import HandoverStyle
from commutator.contract.engine import EngineClient, ModelConfig
from commutator.engine.client import TokenApiClient
from commutator.tokenizer.load import load_text_model
from commutator_engine_kit.kv.transfer.protocol import PullHandover
from commutator_engine_kit.process import EngineStart
from commutator_engine_kit.server import TokenApiServer
from commutator_reference.config import ReferenceConfig
from commutator_reference.model import load_model
from commutator_reference.server import ReferenceServer
from commutator_testing.engines import EngineContract

pytestmark = pytest.mark.slow

MODEL = ModelConfig(name="smollm2", source=SOURCE, max_model_len=2048)
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In 1969, the first human being walked on the",
    "Once upon a time, in a small village by the sea, there lived",
)


@cache
def expected() -> tuple[tuple[list[int], list[int]], ...]:
    """Greedy continuations by transformers, which reads the weights with a loader of its own."""
    text = load_text_model(SOURCE)
    prompts = [text.encode(prompt) for prompt in PROMPTS]
    return tuple((ids, greedy(ids, 16)) for ids in prompts)


# Every test gets an engine of its own; the weights are read once.
load_weights = cache(load_model)


@pytest.mark.proves("reference", "engine conformance suite", how="real engine on CPU")
class TestReference(EngineContract):
    servers: ClassVar[dict[str, ReferenceServer]] = {}
    """By address."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EngineClient]:
        config = ReferenceConfig(kind="reference", kv_cache_bytes=200 << 20)
        with patch("commutator_reference.server.load_model", load_weights):
            engine = ReferenceServer(config, EngineStart(MODEL, "test-0"))
        server = TokenApiServer(engine)
        port = await server.start("127.0.0.1", 0)
        address = f"127.0.0.1:{port}"
        self.servers[address] = engine
        try:
            yield TokenApiClient(address, answer_timeout_s=60)
        finally:
            await server.stop()

    def another_client(self, client: EngineClient) -> EngineClient:
        assert isinstance(client, TokenApiClient)
        return TokenApiClient(client.address, answer_timeout_s=20)

    def handover_style(self, lease_s: float) -> HandoverStyle:
        return PullHandover(lease_s)

    async def spoil_kv(self, client: EngineClient) -> None:
        assert isinstance(client, TokenApiClient)
        self.servers[client.address].arena.tensor.mul_(1.01)

    def golden(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        return expected()

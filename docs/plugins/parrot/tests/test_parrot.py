"""The shipped engine suite. The parrot is no model, so what only a model can do is left out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from commutator import EngineClient, ModelConfig
from commutator.engine import TokenApiClient
from commutator_engine_kit import EngineStart, TokenApiServer
from commutator_parrot import ParrotConfig
from commutator_parrot.__main__ import ParrotEngine
from commutator_testing.engines import EngineContract


class TestParrot(EngineContract):
    capabilities = frozenset[str]()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EngineClient]:
        config = ParrotConfig(kind="parrot", tokens_per_second=1000)
        start = EngineStart(ModelConfig(name="parrot", source="-"), "test-0")
        server = TokenApiServer(ParrotEngine(config, start))
        port = await server.start("127.0.0.1", 0)
        yield TokenApiClient(f"127.0.0.1:{port}")
        await server.stop()

    def another_client(self, client: EngineClient) -> EngineClient:
        assert isinstance(client, TokenApiClient)
        return TokenApiClient(client.address)

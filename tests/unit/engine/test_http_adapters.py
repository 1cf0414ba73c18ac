"""A client of an HTTP engine has its server load adapters: once for many, again after a failure."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from commutator import AdapterIdentity, EngineInfo, EngineLoad, GenerateRequest
from commutator.engine.protocol import DeltaStream
from commutator.errors import EngineError, RequestError
from commutator_engine_kit.http import HttpEngineClient, HttpServer
from commutator_engine_kit.model_identity import adapter_digest


class Client(HttpEngineClient):
    """Of a server that nobody asks anything else."""

    def __init__(self) -> None:
        super().__init__(HttpServer("Fake", "http://127.0.0.1:9", alive_path="/"))
        self.loads = 0
        self.fails: Exception | None = None

    async def discover(self) -> EngineInfo:
        raise EngineError("not asked here")

    async def answer(self, request: GenerateRequest, model: str, stream: DeltaStream) -> None:
        raise EngineError("not asked here")

    async def load(self) -> EngineLoad:
        return EngineLoad()

    async def _load_adapter(self, adapter: AdapterIdentity) -> None:
        self.loads += 1
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails


async def test_several_requests_wait_for_one_load(tmp_path: Path) -> None:
    asked = AdapterIdentity(name="sql", digest=adapter_digest(tmp_path), source=str(tmp_path))
    client = Client()
    await asyncio.gather(*(client._need_adapter(asked) for _ in range(5)))
    await client._need_adapter(asked)
    assert client.loads == 1
    await client.close()


@pytest.mark.parametrize("error", [RequestError("no room"), OSError("no such disk")])
async def test_after_any_failure_the_next_request_tries_again(error: Exception) -> None:
    asked = AdapterIdentity(name="sql", digest="a" * 64, source="/nowhere")
    client = Client()
    client.fails = error
    both = await asyncio.gather(
        *(client._need_adapter(asked) for _ in range(2)), return_exceptions=True
    )
    assert both == [error, error]
    assert client.loads == 1
    client.fails = None
    await client._need_adapter(asked)
    assert client.loads == 2
    await client.close()

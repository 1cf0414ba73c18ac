"""The client of a launched vLLM server that serves the token API beside its own HTTP endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

from attrs import evolve, frozen

from commutator import EngineInfo, WorkerRecord
from commutator.engine import TokenApiClient
from commutator_engine_kit.http import HttpAnswer, HttpServer
from commutator_engine_kit.launching import api_key_at
from commutator_vllm.handover import handover_info

__all__ = ["TokenApiAddress", "VllmTokenClient"]


@frozen
class TokenApiAddress:
    """Where one server serves both; written ``URL?token_api=HOST:PORT``."""

    url: str
    """Of vLLM's own endpoints, or of their relay."""
    token_api: str
    """Of the token API, "host:port"."""

    def __str__(self) -> str:
        return f"{self.url}?token_api={self.token_api}"

    @classmethod
    def parse(cls, address: str) -> TokenApiAddress | None:
        """None for an address without a token API."""
        parts = urlsplit(address)
        found = parse_qs(parts.query).get("token_api")
        return cls(f"{parts.scheme}://{parts.netloc}", found[0]) if found else None


class VllmTokenClient(TokenApiClient):
    """Sends requests over the token API, and clients' own HTTP requests to vLLM's endpoints."""

    def __init__(self, address: TokenApiAddress, *, hands_over: bool = False) -> None:
        super().__init__(address.token_api)
        self._server = HttpServer(
            "vLLM", address.url, api_key=api_key_at(address.url), of_cluster=True
        )
        self._hands_over = hands_over

    def expect(self, record: WorkerRecord) -> None:
        super().expect(record)
        self._server.expect(record)

    async def start(self) -> EngineInfo:
        info = await super().start()
        if not self._hands_over:
            return info
        return evolve(info, handover=handover_info(info.model, info.version, info.block_size))

    @asynccontextmanager
    async def forward(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[HttpAnswer]:
        async with self._server.forward(path, body, headers) as answer:
            yield answer

    async def close(self) -> None:
        await super().close()
        await self._server.close()

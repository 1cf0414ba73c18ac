"""The client of a launched vLLM server that serves the token API beside its own HTTP endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

from attrs import evolve, frozen

from commutator import EngineInfo
from commutator.engine import TokenApiClient
from commutator.engine.http import HttpAnswer, HttpServer
from commutator.engine.launching import api_key_at
from commutator_vllm.handover import handover_info

__all__ = ["TokenApiAddress", "VllmTokenClient"]


@frozen
class TokenApiAddress:
    """Where one server serves both; written ``http://HOST:PORT?token_api=PORT``."""

    host: str
    http_port: int
    token_port: int

    def __str__(self) -> str:
        return f"{self.url}?token_api={self.token_port}"

    @property
    def url(self) -> str:
        """Of vLLM's own endpoints."""
        return f"http://{self.host}:{self.http_port}"

    @property
    def token_api(self) -> str:
        """Of the token API, "host:port"."""
        return f"{self.host}:{self.token_port}"

    @classmethod
    def parse(cls, address: str) -> TokenApiAddress | None:
        """None for an address without a token API."""
        parts = urlsplit(address)
        ports = parse_qs(parts.query).get("token_api")
        if not ports or parts.hostname is None or parts.port is None:
            return None
        return cls(parts.netloc.rpartition(":")[0], parts.port, int(ports[0]))


class VllmTokenClient(TokenApiClient):
    """Sends requests over the token API, and clients' own HTTP requests to vLLM's endpoints."""

    def __init__(self, address: TokenApiAddress, *, hands_over: bool = False) -> None:
        super().__init__(address.token_api)
        self._server = HttpServer("vLLM", address.url, api_key=api_key_at(address.url))
        self._hands_over = hands_over

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

"""ASGI middleware that makes vLLM's API server serve the token API, too, on the same engine.

A launched server loads it by ``--middleware``. It adds nothing to vLLM's own endpoints.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from commutator_engine_kit import TokenApiServer
from commutator_vllm.token_engine import VllmTokenEngine

__all__ = ["LISTEN_AT", "TokenApi"]

log = logging.getLogger("vllm.commutator")  # vLLM configures only its own loggers

LISTEN_AT = "COMMUTATOR_VLLM_TOKEN_API"
"""The environment variable with the address of the token API, "host:port"."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class TokenApi:
    """Serves the token API from the end of the app's start to its shutdown."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._server: TokenApiServer | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        state = scope["app"].state

        async def send_when_ready(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                try:
                    await self._start(state)
                except (OSError, ValueError) as error:
                    message = {"type": "lifespan.startup.failed", "message": f"token API: {error}"}
            await send(message)

        try:
            await self._app(scope, receive, send_when_ready)
        finally:
            if self._server is not None:
                await self._server.stop()

    async def _start(self, state: Any) -> None:
        from commutator_vllm.async_llm import AsyncLlmEngine

        host, _, port = os.environ[LISTEN_AT].rpartition(":")
        engine = await AsyncLlmEngine.of(state, host)
        self._server = TokenApiServer(VllmTokenEngine(engine, self._died))
        bound = await self._server.start(host, int(port))
        log.info("token API on %s:%d", host, bound)

    def _died(self) -> None:
        """Close every connection: clients continue their answers elsewhere. vLLM ends itself."""
        assert self._server is not None
        self._stopping = asyncio.get_running_loop().create_task(self._server.stop())

"""ASGI middleware for a launched server: the API key of the run, at every path but two.

vLLM asks for its key below /v1 and a few other prefixes only; /invocations generates without it.
This file is copied for the server, whose environment may lack our package: it imports nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from hmac import compare_digest
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_OPEN = ("/health", "/metrics")
"""For probes and scrapers, as at SGLang; they say nothing about requests."""


class KeyGuard:
    """Answers 401 unless a request brings the key of the variable VLLM_API_KEY."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._wanted = b"Bearer " + os.environ["VLLM_API_KEY"].encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan" or scope["path"] in _OPEN or self._has_key(scope):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _has_key(self, scope: Message) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return compare_digest(given, self._wanted)

"""Pods that answer as vLLM does, for gateways before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from bench.envoy import ENVOY
from tests.support.front_door import TEXT
from tests.support.http_engine import Server

__all__ = ["MODEL_ID", "Pod", "needs_envoy", "running_pods"]

MODEL_ID = "org/model"
"""What pods call their model."""
needs_envoy = pytest.mark.skipif(not ENVOY.exists(), reason="Envoy is missing: make peers")


class Pod(Server):
    """A server with vLLM's HTTP API, as far as a picker and its clients use it."""

    def __init__(self, *, step_s: float = 0.0) -> None:
        """``step_s``: seconds between two tokens."""
        super().__init__()
        self.step_s = step_s
        self.port = 0
        self.requests: list[tuple[dict[str, Any], Mapping[str, str]]] = []
        """Bodies and headers."""
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.status = 200

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)
        return app

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL_ID, "max_model_len": 8192}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        texts = [one for one in body["messages"] if isinstance(one["content"], str)]
        rendered = TEXT.chat_prompt(texts or [{"role": "user", "content": "A picture"}]).text
        prompt = TEXT.encode(rendered, add_special_tokens=False)
        return await self._answer(request, body, prompt)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, TEXT.encode(body["prompt"]))

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: Sequence[int]
    ) -> web.StreamResponse:
        self.requests.append((body, request.headers.copy()))
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        cached = self._store([*prompt])
        self.cached_tokens += cached
        self.prompt_tokens += len(prompt)
        count = body.get("max_tokens", 3)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if not body.get("stream"):
            await asyncio.sleep(self.step_s * count)
            text = " ".join(["word"] * count)
            return web.json_response({"choices": [{"text": text}], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number in range(count):
                await asyncio.sleep(self.step_s)
                await self._send(response, {"choices": [{"text": f"{number} "}]})
            await self._send(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        self.served += 1
        return response


@asynccontextmanager
async def running_pods(count: int, *, step_s: float = 0.0) -> AsyncIterator[list[Pod]]:
    """Pods on free ports of this machine, in this process."""
    pods, runners = [Pod(step_s=step_s) for _ in range(count)], []
    try:
        for pod in pods:
            runner = web.AppRunner(pod.app(), handler_cancellation=True)
            runners.append(runner)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            assert runner.addresses
            pod.port = runner.addresses[0][1]
        yield pods
    finally:
        for runner in runners:
            await runner.cleanup()

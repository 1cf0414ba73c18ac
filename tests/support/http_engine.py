"""A server that answers as vLLM does, with KV events, for clusters: ``python http_engine.py PORT``.

It echoes the prompt's tokens slowly, notes what was aborted, and publishes on sockets that ask for
no proof of who reads, as vLLM's do.
"""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import web

from commutator.contract.block import BlockStored
from commutator_engine_kit import EventPublisher

BLOCK = 16
STEP_S = 0.02
METRICS = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0\n'


class Server:
    """State of the whole process."""

    def __init__(self) -> None:
        self.events = EventPublisher()
        self.stored: set[int] = set()
        self.aborted = 0
        self.served = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self.health)
        app.router.add_get("/version", self.version)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/kv_event_sources", self.sources)
        app.router.add_get("/aborted", self.count)
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/v1/embeddings", self.embeddings)
        return app

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "9.9"})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 2048}]})

    async def sources(self, _: web.Request) -> web.Response:
        source = self.events.source
        facts = {"endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint}
        return web.json_response({"0": facts})

    async def count(self, _: web.Request) -> web.Response:
        return web.json_response({"aborted": self.aborted, "served": self.served})

    async def embeddings(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [], "asked": await request.json()})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt: list[int] = body["token_ids"]
        cached = self._store(prompt)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for number in range(body["sampling_params"]["max_tokens"]):
                await asyncio.sleep(STEP_S)
                choice = {"token_ids": [prompt[number % len(prompt)]]}
                await self._send(response, {"choices": [choice]})
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        usage = {
            "prompt_tokens": len(prompt),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        await self._send(
            response, {"choices": [{"token_ids": [], "finish_reason": "length"}], "usage": usage}
        )
        await response.write(b"data: [DONE]\n\n")
        self.served += 1
        return response

    async def _send(self, response: web.StreamResponse, value: object) -> None:
        await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _store(self, prompt: list[int]) -> int:
        """Publish the blocks that are new. Returns the tokens that were there."""
        parent, cached = None, 0
        for end in range(BLOCK, len(prompt), BLOCK):
            key = hash((parent, *prompt[end - BLOCK : end]))
            if key in self.stored:
                cached += BLOCK
            else:
                self.stored.add(key)
                stored = BlockStored(
                    block_hashes=(key & (2**64 - 1),),
                    parent_block_hash=None if parent is None else parent & (2**64 - 1),
                    token_ids=tuple(prompt[end - BLOCK : end]),
                    block_size=BLOCK,
                )
                self.events.publish([stored])
            parent = key
        return cached


async def main() -> None:
    runner = web.AppRunner(Server().app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(sys.argv[1])).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

"""The reference engine behind the stand-in, so that tokens and hand-overs are real."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from typing import Any
from unittest.mock import patch

from attrs import asdict, evolve
from msgspec import json
from tests.support.trtllm.queues import EventQueue, StatisticsQueue
from tests.support.trtllm.server import StandIn

from commutator.contract.engine import ModelConfig, TokenStream
from commutator.contract.request import FinishReason, GenerateRequest, TokenDelta, TokenLogprob
from commutator.contract.worker import EngineLoad
from commutator.engine.client import TokenApiClient
from commutator.errors import EngineError, EngineHandoverError
from commutator.tokenizer.load import load_text_model
from commutator.tokenizer.text_model import TextModel
from commutator_engine_kit.kv.transfer.protocol import DecodeTransferParams, PrefillTransferParams
from commutator_engine_kit.process import EngineStart
from commutator_engine_kit.server import TokenApiServer
from commutator_reference.config import ReferenceConfig
from commutator_reference.model import LlamaModel, load_model
from commutator_reference.server import ReferenceServer

__all__ = ["ReferenceSource", "running_stand_in"]


class ReferenceSource:
    """Context and generation legs become those of the reference engine, found by their number."""

    def __init__(self, client: TokenApiClient, text: TextModel) -> None:
        self.transfer_timeout_s = 60.0
        """How long a context server keeps KV that is not fetched, and a generation server waits."""
        self._client = client
        self._text = text

    def generate(self, request: GenerateRequest) -> TokenStream:
        return self._client.generate(request)

    async def context(
        self, request: GenerateRequest, words: dict[str, Any]
    ) -> AsyncGenerator[tuple[TokenDelta, dict[str, Any] | None], None]:
        asked = request.sampling
        one = evolve(asked, max_tokens=1, min_tokens=min(1, asked.min_tokens))
        (first,) = [delta async for delta in self._all(evolve(request, sampling=one))]
        if first.finish_reason is FinishReason.STOP:
            yield first, None
            return
        number = words["disagg_request_id"]
        # The generation server asks with the first token, so the blocks are named with it.
        held = evolve(
            request,
            token_ids=[*request.token_ids, *first.token_ids],
            sampling=one,
            handover=asdict(PrefillTransferParams(str(number), self.transfer_timeout_s)),
        )
        async for _ in self._all(held):
            pass
        info = await self._client.start()
        assert info.handover is not None
        address = info.handover.address
        state = {"number": number, "address": address, "block_size": info.block_size}
        yield (
            first,
            {
                "request_type": "context_only",
                "first_gen_tokens": list(first.token_ids),
                "first_gen_log_probs": [entry.logprob for entry in first.logprobs] or None,
                "ctx_request_id": number,
                "encoded_opaque_state": base64.b64encode(json.encode(state)).decode(),
                "draft_tokens": None,
                "disagg_request_id": number,
                "ctx_dp_rank": 0,
                "ctx_info_endpoint": None,
                "schedule_style": 0,
            },
        )

    async def generation(
        self, request: GenerateRequest, words: dict[str, Any]
    ) -> AsyncGenerator[TokenDelta, None]:
        state = json.decode(base64.b64decode(words["encoded_opaque_state"]))
        if not state["number"] == words["disagg_request_id"] == words["ctx_request_id"]:
            raise EngineHandoverError("no KV of that number")
        first = tuple(words["first_gen_tokens"])
        asked, begun = request.sampling, len(first)
        longer = evolve(asked, max_tokens=max(asked.max_tokens, begun + 1))
        fetched = DecodeTransferParams(
            str(state["number"]),
            state["address"],
            state["block_size"],
            self.transfer_timeout_s,
        )
        leg = evolve(
            request,
            token_ids=[*request.token_ids, *first],
            sampling=longer,
            generated_prefix=begun,
            handover=asdict(fetched),
        )
        told = False
        async with aclosing(self._all(leg)) as deltas:
            async for delta in deltas:
                if not told:
                    values = zip(first, words["first_gen_log_probs"] or (), strict=False)
                    logprobs = tuple(
                        TokenLogprob(token_id=token, logprob=value) for token, value in values
                    )
                    yield TokenDelta(
                        token_ids=first, logprobs=logprobs, cached_tokens=delta.cached_tokens
                    )
                    told = True
                if asked.max_tokens <= begun:
                    yield TokenDelta(finish_reason=FinishReason.LENGTH)
                    return
                yield delta

    async def load(self) -> EngineLoad:
        return await self._client.load()

    def encode(self, text: Any) -> list[int]:
        if isinstance(text, str):
            return self._text.encode(text)
        prompt = self._text.chat_prompt(text, add_generation_prompt=True).text
        return self._text.encode(prompt, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._text.decode(token_ids)

    async def _all(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        async with aclosing(self._client.generate(request)) as stream:
            async for delta in stream:
                if delta.finish_reason is FinishReason.ERROR:
                    raise EngineError(delta.error or "failed")
                yield delta


@asynccontextmanager
async def running_stand_in(
    model: ModelConfig,
    config: ReferenceConfig,
    *,
    port: int = 0,
    event_buffer: int = 65536,
    load: Callable[..., LlamaModel] = load_model,
) -> AsyncIterator[tuple[str, StandIn, ReferenceSource, ReferenceServer]]:
    """A server over a reference engine of its own, whose weights come from ``load``."""
    with closing(EventQueue(max_size=event_buffer)) as events:
        with (
            patch("commutator_reference.server.load_model", load),
            patch("commutator_reference.server.EventPublisher", lambda **_: events),
        ):
            engine = await asyncio.to_thread(
                ReferenceServer, config, EngineStart(model, f"stand-in-{id(events)}")
            )
        api = TokenApiServer(engine)
        address = f"127.0.0.1:{await api.start('127.0.0.1', 0)}"
        client = TokenApiClient(address, answer_timeout_s=60)
        try:
            await client.start()
            source = ReferenceSource(client, load_text_model(model.source))
            stand_in = StandIn(source, events, StatisticsQueue(config.block_size))
            async with stand_in.running(port=port) as url:
                yield url, stand_in, source, engine
        finally:
            await client.close()
            await api.stop()

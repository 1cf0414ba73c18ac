"""Made-up tokens, and hand-overs without KV, for tests of the sidecar and the client."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from attrs import define, field
from tests.support.trtllm.queues import EventQueue, StatisticsQueue
from tests.support.trtllm.server import StandIn

from commutator.contract.engine import TokenStream
from commutator.contract.request import FinishReason, GenerateRequest, TokenDelta, TokenLogprob
from commutator.contract.worker import EngineLoad
from commutator.engine.protocol import DeltaStream
from commutator.errors import EngineUnavailableError, RequestError
from commutator_trtllm.client import TrtllmClient
from commutator_trtllm.sidecar import Sidecar, SidecarOptions

__all__ = ["BLOCK", "FakeSource", "sidecar_of", "until_ready"]

BLOCK = 4
LONGEST = 100


@define(eq=False)
class FakeSource:
    """Answers a prompt with the numbers from 10 on, one in each turn of the event loop."""

    hangs: bool = False
    """After the first token."""
    fails: Exception | None = None
    """Instead of the second token."""
    transfers: bool = True
    """Whether generation legs get their KV."""
    running: int = 0
    aborted: asyncio.Event = field(factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(factory=set)

    def generate(self, request: GenerateRequest) -> TokenStream:
        stream = DeltaStream(self.aborted.set)
        task = asyncio.create_task(self._fill(request, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _fill(self, request: GenerateRequest, stream: DeltaStream) -> None:
        if len(request.token_ids) > LONGEST:
            stream.fail(RequestError("the prompt is too long"))
            return
        for token in itertools.count(10):
            if token == 11 and self.hangs:
                return
            if token == 11 and self.fails is not None:
                stream.fail(self.fails)
                return
            logprob = (TokenLogprob(token_id=token, logprob=-0.5),)
            asked = request.sampling.top_logprobs is not None
            last = token - 10 == request.sampling.max_tokens - 1
            reason = FinishReason.LENGTH if last else None
            stream.feed(
                TokenDelta(
                    token_ids=(token,),
                    logprobs=logprob if asked else (),
                    finish_reason=reason,
                    cached_tokens=4,
                )
            )
            if last:
                return
            await asyncio.sleep(0)

    async def context(
        self, request: GenerateRequest, words: dict[str, Any]
    ) -> AsyncGenerator[tuple[TokenDelta, dict[str, Any] | None], None]:
        yield (
            TokenDelta(token_ids=(10,), finish_reason=FinishReason.LENGTH),
            {
                "request_type": "context_only",
                "first_gen_tokens": [10],
                "ctx_request_id": words["disagg_request_id"],
                "encoded_opaque_state": "AAEC",
                "disagg_request_id": words["disagg_request_id"],
            },
        )

    async def generation(
        self, request: GenerateRequest, words: dict[str, Any]
    ) -> AsyncGenerator[TokenDelta, None]:
        if not self.transfers:
            raise EngineUnavailableError("no KV came")
        assert words["disagg_request_id"] == words["ctx_request_id"]
        async for delta in self.generate(request):
            yield delta

    async def load(self) -> EngineLoad:
        return EngineLoad(running=self.running, kv_used_blocks=3, kv_capacity_blocks=9)

    def encode(self, text: Any) -> list[int]:
        return [len(str(text))]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in token_ids)


@asynccontextmanager
async def sidecar_of(
    source: FakeSource, *, port: int = 0, hands_over: bool = True
) -> AsyncIterator[tuple[TrtllmClient, StandIn, EventQueue]]:
    """A client, not yet started, of a server and its sidecar, which are ready."""
    events = EventQueue()
    stand_in = StandIn(source, events, StatisticsQueue(BLOCK), wait_s=0.02)
    async with stand_in.running(port=port) as url:
        options = SidecarOptions(url=url, max_model_len=64, hands_over=hands_over)
        async with Sidecar(options).running() as address:
            await until_ready(address)
            stand_in.bodies.clear()
            client = TrtllmClient(address)
            try:
                yield client, stand_in, events
            finally:
                await client.close()


async def until_ready(address: str) -> None:
    """Wait until the sidecar knows what its server is."""
    client = TrtllmClient(address)
    async with asyncio.timeout(60):
        while True:
            try:
                await client.start()
                break
            except EngineUnavailableError:
                await asyncio.sleep(0.02)
    await client.close()

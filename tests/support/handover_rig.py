"""Workers with a tiny model that hand KV over to each other, in this process or in their own.

``python -m tests.support.handover_rig OPTIONS`` serves one, prints its port as a line of JSON, and
ends with its standard input.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from attrs import asdict, frozen
from tests.support.tiered_engine import IDENTITY
from tests.support.tiny_llama import tiny_model

from commutator.engine import Emit, TokenApiClient, TokenApiServer, TokenEngine
from commutator.engine.handover import HandoverLegs, PullHandover, PullTimes
from commutator.types import (
    EngineInfo,
    EngineLoad,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    WorkerRecord,
)
from commutator_reference.engine import ReferenceEngine
from commutator_reference.handover import Handover, handover_info
from commutator_reference.options import EngineOptions
from commutator_reference.scheduler import SchedulerLimits

__all__ = ["TinyOptions", "TinyWorker", "Worker", "hand_over", "legs", "request", "tiny_worker"]


@frozen
class TinyOptions:
    """What a tiny worker is like."""

    num_blocks: int = 200
    block_size: int = 4
    max_tokens_per_step: int = 64
    step_pause_s: float = 0.0
    """Added to each step, so that a prefill takes long enough to be disturbed."""
    hangs_after_steps: int | None = None
    """It then computes nothing more, for ever."""
    silence_s: float = 30.0
    seed: int = 0
    host: str = "127.0.0.1"


class TinyWorker(TokenEngine):
    """The reference engine without files."""

    def __init__(self, options: TinyOptions) -> None:
        self.options = options
        self.engine = ReferenceEngine(
            tiny_model(seed=options.seed),
            EngineOptions(
                num_blocks=options.num_blocks,
                block_size=options.block_size,
                limits=SchedulerLimits(16, options.max_tokens_per_step),
            ),
        )
        self.info = handover_info(IDENTITY, self.engine.arena)
        self.handed = Handover(
            self.info,
            self.engine.arena,
            agent_name=f"tiny-{uuid.uuid4().hex}",
            wake=self.engine.wake,
            times=PullTimes(poll_s=0.2, silence_s=options.silence_s),
        )
        self.engine.use_handover(self.handed)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, emit: Emit) -> EngineInfo:
        self.handed.start()
        compute = self.engine._compute

        steps = itertools.count()

        def paused(step: Any) -> Any:
            if next(steps) == self.options.hangs_after_steps:
                threading.Event().wait()
            time.sleep(self.options.step_pause_s)
            return compute(step)

        self.engine._compute = paused  # type: ignore[method-assign]
        self._thread = threading.Thread(
            target=self.engine.run, args=(emit, self._stopping), daemon=True
        )
        self._thread.start()
        return EngineInfo(
            kind="tiny",
            version="0",
            model="tiny",
            max_model_len=self.engine.max_model_len,
            block_size=self.options.block_size,
            kv_capacity_blocks=self.options.num_blocks,
            handover=self.info,
            continues_answers=True,
        )

    def submit(self, key: int, request: GenerateRequest) -> None:
        self.engine.submit(key, request)

    def abort(self, key: int) -> None:
        self.engine.abort(key)

    def load(self) -> EngineLoad:
        return self.engine.load()

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    async def handover(self, what: str, arguments: Mapping[str, Any]) -> Any:
        return await self.handed.answer(what, arguments)

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self.handed.stop()


@frozen(eq=False)
class Worker:
    """One to talk to."""

    client: TokenApiClient
    record: WorkerRecord
    tiny: TinyWorker | None = None
    """Where it runs in this process."""

    async def tokens(self, request: GenerateRequest) -> list[int]:
        """The whole answer. Raises what the client raises."""
        return [token async for delta in self.client.generate(request) for token in delta.token_ids]

    async def until_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until no block, lease or hand-over is left."""
        async with asyncio.timeout(timeout_s):
            while True:
                load = await self.client.load()
                said = await self.client.handover("statistics", {})
                left = (
                    load.running,
                    load.waiting,
                    load.kv_used_blocks,
                    said["exports"]["active"],
                    said["exports"]["held_blocks"],
                    said["pulls"]["active"],
                )
                if not any(left):
                    return
                await asyncio.sleep(0.02)


async def connect(address: str, tiny: TinyWorker | None = None) -> Worker:
    client = TokenApiClient(address, answer_timeout_s=60)
    info = await client.start()
    return Worker(client, WorkerRecord(address, "tiny", "tiny", "tiny", address, info), tiny)


@asynccontextmanager
async def tiny_worker(**options: Any) -> AsyncIterator[Worker]:
    """One in this process."""
    tiny = TinyWorker(TinyOptions(**options))
    server = TokenApiServer(tiny)
    port = await server.start("127.0.0.1", 0)
    worker = await connect(f"127.0.0.1:{port}", tiny)
    try:
        yield worker
    finally:
        await worker.client.close()
        await server.stop()


def request(token_ids: Sequence[int], new_tokens: int = 6, **changes: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(uuid.uuid4().hex, list(token_ids), sampling, **changes)


def legs(
    asked: GenerateRequest,
    prefill: Worker,
    decode: Worker,
    *,
    lease_s: float = 60.0,
    timeout_s: float = 60.0,
) -> tuple[GenerateRequest, GenerateRequest]:
    """What each of both is sent."""
    style = PullHandover(lease_s)
    both = HandoverLegs(uuid.uuid4().hex, asked, prefill.record, decode.record, timeout_s=timeout_s)
    return style.prefill_request(both), style.decode_request(both, None)


async def hand_over(
    asked: GenerateRequest, prefill: Worker, decode: Worker, **options: Any
) -> list[TokenDelta]:
    """The decode leg's deltas, the prefill leg beside it; its failure is not this one's."""
    first, second = legs(asked, prefill, decode, **options)
    prefilling = asyncio.create_task(prefill.tokens(first))
    try:
        return [delta async for delta in decode.client.generate(second)]
    finally:
        prefilling.cancel()
        await asyncio.gather(prefilling, return_exceptions=True)


async def _serve(options: TinyOptions) -> None:
    server = TokenApiServer(TinyWorker(options))
    port = await server.start(options.host, 0)
    print(json.dumps({"port": port}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


if __name__ == "__main__":
    given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    asyncio.run(_serve(TinyOptions(**{**asdict(TinyOptions()), **given})))

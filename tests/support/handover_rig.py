"""Workers with a tiny model that hand KV over to each other, in this process or in their own.

``python -m tests.support.handover_rig OPTIONS`` serves one, prints its port as a line of JSON, and
ends with its standard input. Without OPTIONS, it loads its libraries and waits for them as a line
of its standard input.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from attrs import asdict, frozen
from tests.support.reference_options import sized
from tests.support.tiered_engine import IDENTITY
from tests.support.tiny_llama import tiny_model

from commutator.contract.disagg import HandoverRequest
from commutator.contract.request import GenerateRequest, SamplingParams, TokenDelta
from commutator.contract.worker import EngineInfo, EngineLoad, TransferStatistics, WorkerRecord
from commutator.engine.client import TokenApiClient
from commutator_engine_kit.kv.transfer.protocol import PullHandover
from commutator_engine_kit.kv.transfer.puller import PullTimes
from commutator_engine_kit.server import Emit, TokenApiServer, TokenEngine
from commutator_reference.decoder import DecoderModel
from commutator_reference.engine import ReferenceEngine
from commutator_reference.handover import Handover

__all__ = [
    "TinyOptions",
    "TinyWorker",
    "Worker",
    "hand_over",
    "phases",
    "request",
    "tiny_worker",
]


@frozen
class TinyOptions:
    """The options of a tiny worker."""

    num_blocks: int = 200
    block_size: int = 4
    max_tokens_per_step: int = 64
    step_pause_s: float = 0.0
    """Added to each step, so that a prefill takes long enough to be disturbed."""
    hangs_after_steps: int | None = None
    """After this number of steps it hangs for ever."""
    silence_s: float = 30.0
    seed: int = 0
    family: str | None = None
    """Which of ``grouped_models`` it serves; None: a tiny Llama model."""
    host: str = "127.0.0.1"


class TinyWorker(TokenEngine):
    """The reference engine without files."""

    def __init__(self, options: TinyOptions) -> None:
        self.options = options
        self.engine = ReferenceEngine(
            tiny_model(seed=options.seed) if options.family is None else _grouped(options.family),
            *sized(
                num_blocks=options.num_blocks,
                block_size=options.block_size,
                max_running_requests=16,
                max_tokens_per_step=options.max_tokens_per_step,
            ),
        )
        self.handed = Handover(
            IDENTITY,
            self.engine.arena,
            self.engine.pool,
            agent_name=f"tiny-{uuid.uuid4().hex}",
            wake=self.engine.wake,
            host=options.host,
            times=PullTimes(poll_s=0.2, silence_s=options.silence_s),
        )
        self.info = self.handed.info
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
            block_size=self.engine.block_size,
            kv_capacity_blocks=self.options.num_blocks,
            handover=self.handed.info,
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

    def transfer_statistics(self) -> TransferStatistics:
        return self.handed.statistics()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self.handed.stop()


def _grouped(family: str) -> DecoderModel:
    import torch
    from tests.support.grouped_models import grouped_model

    torch.set_num_threads(1)
    return grouped_model(family)


@frozen(eq=False)
class Worker:
    """A running worker and its client."""

    client: TokenApiClient
    record: WorkerRecord
    tiny: TinyWorker | None = None
    """The worker itself, if it runs in this process."""

    async def tokens(self, request: GenerateRequest) -> list[int]:
        """The whole answer. Raises what the client raises."""
        return [token async for delta in self.client.generate(request) for token in delta.token_ids]

    async def until_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until no block, lease or hand-over is left."""
        async with asyncio.timeout(timeout_s):
            while True:
                load = await self.client.load()
                counted = await self.client.handover_statistics()
                left = (
                    load.running,
                    load.waiting,
                    load.kv_used_blocks,
                    counted.exports.active,
                    counted.exports.held_blocks,
                    counted.pulls.active,
                )
                if not any(left):
                    return
                await asyncio.sleep(0.02)


async def connect(address: str, tiny: TinyWorker | None = None) -> Worker:
    client = TokenApiClient(address, answer_timeout_s=60)
    info = await client.start()
    return Worker(
        client,
        WorkerRecord(
            worker_id=address, engine="tiny", kind="tiny", model="tiny", address=address, info=info
        ),
        tiny,
    )


@asynccontextmanager
async def tiny_worker(**options: Any) -> AsyncIterator[Worker]:
    """A worker in this process."""
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
    return GenerateRequest(
        request_id=uuid.uuid4().hex, token_ids=list(token_ids), sampling=sampling, **changes
    )


def phases(
    asked: GenerateRequest,
    prefill: Worker,
    decode: Worker,
    *,
    lease_s: float = 60.0,
    timeout_s: float = 60.0,
) -> tuple[GenerateRequest, GenerateRequest]:
    """The requests of the prefill and of the decode."""
    style = PullHandover(lease_s)
    both = HandoverRequest(
        handover_id=uuid.uuid4().hex,
        request=asked,
        prefill=prefill.record,
        decode=decode.record,
        timeout_s=timeout_s,
    )
    return style.prefill_request(both), style.decode_request(both, None)


async def hand_over(
    asked: GenerateRequest, prefill: Worker, decode: Worker, **options: Any
) -> list[TokenDelta]:
    """The deltas of the decode, with the prefill beside it, whose failure is ignored."""
    first, second = phases(asked, prefill, decode, **options)
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
    line = sys.argv[1] if len(sys.argv) > 1 else sys.stdin.readline()
    if not line:
        sys.exit(0)  # a spare that nobody needed
    given = json.loads(line)
    asyncio.run(_serve(TinyOptions(**{**asdict(TinyOptions()), **given})))

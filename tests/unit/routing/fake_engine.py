"""An engine's event sockets in the hands of a test: messages can be lost, and the engine die.

With it, one prompt of eight blocks, and what to expect of the index when the engine has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Self

import zmq
import zmq.asyncio

from commutator.contract.block import BlockStored, EventBatch, KvEvent
from commutator.contract.routing import Overlap, WorkerRank
from commutator.contract.worker import EngineInfo, EventSource, WorkerRecord
from commutator.kv_events.codec import encode_batch
from commutator.kv_events.subscriber import SourceTimes
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.indexer import KvIndexer

SIZE = 4
TOKENS = tuple(range(100, 100 + 8 * SIZE))
HASHES = sequence_hashes(TOKENS, SIZE)
TIMES = SourceTimes(replay_timeout_s=0.3, settle_s=0.05, check_interval_s=0.5)

_END = (-1).to_bytes(8, "big", signed=True)


class FakeEngine:
    """Publishes the events of a test; use as an async context manager.

    ``keep``: how many messages it replays. ``answers``: False leaves replay requests unanswered.
    """

    def __init__(self, source: EventSource | None = None, *, keep: int = 1000) -> None:
        self.keep = keep
        self.answers = True
        self.log: list[bytes] = []
        self.requests: list[int] = []
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 200)
        if source is None:
            ports = [socket.bind_to_random_port("tcp://127.0.0.1")
                     for socket in (self._pub, self._router)]  # fmt: skip
            events, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
            source = EventSource(endpoint=events, replay_endpoint=replay)
        else:
            assert source.replay_endpoint is not None
            self._pub.bind(source.endpoint)
            self._router.bind(source.replay_endpoint)
        self.source = source

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._pub.close()
        self._router.close()
        self._context.term()

    async def subscribed(self) -> None:
        """Wait for a subscription: what is published earlier is lost."""
        await self._pub.recv()

    async def publish(self, *events: KvEvent, lost: bool = False, rank: int = 0) -> None:
        await self.send(
            encode_batch(
                EventBatch(timestamp_s=float(id(self)), events=events, data_parallel_rank=rank)
            ),
            lost=lost,
        )

    async def send(self, body: bytes, *, lost: bool = False) -> None:
        """``lost``: only a replay brings it."""
        sequence = len(self.log)
        self.log.append(body)
        if not lost:
            await self._pub.send_multipart([b"", sequence.to_bytes(8, "big"), body])

    async def send_frames(self, frames: Sequence[bytes]) -> None:
        await self._pub.send_multipart(list(frames))

    async def _serve(self) -> None:
        while True:
            identity, empty, first = await self._router.recv_multipart()
            self.requests.append(int.from_bytes(first, "big"))
            if not self.answers:
                continue
            for sequence, body in enumerate(self.log):
                if sequence >= max(self.requests[-1], len(self.log) - self.keep):
                    number = sequence.to_bytes(8, "big")
                    await self._router.send_multipart([identity, empty, b"", number, body])
            await self._router.send_multipart([identity, empty, b"", _END, b""])


def record(worker_id: str, info: EngineInfo) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id, engine="e", kind="fake", model="m", address="127.0.0.1:1", info=info
    )


def info(source: EventSource | None, *, block_size: int = 4, ranks: int = 1) -> EngineInfo:
    return EngineInfo(
        kind="fake",
        version="1",
        model="m",
        max_model_len=1000,
        block_size=block_size,
        kv_capacity_blocks=100,
        data_parallel_size=ranks,
        kv_events=source,
    )


def stored(first: int, end: int, *, medium: str = "GPU", block_size: int = SIZE) -> BlockStored:
    return BlockStored(
        block_hashes=tuple(range(1000 + first, 1000 + end)),
        parent_block_hash=999 + first if first else None,
        token_ids=TOKENS[first * block_size : end * block_size],
        block_size=block_size,
        medium=medium,
    )


def device(blocks: int) -> dict[WorkerRank, Overlap]:
    return {WorkerRank("w0"): Overlap(device=blocks)}


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"still not true after {timeout_s} s"
        await asyncio.sleep(0.005)


async def known(subscriber: KvIndexer, blocks: int) -> None:
    """Wait until worker w0, and no other, is known to hold the prompt's first ``blocks``."""
    expected = device(blocks) if blocks else {}
    await until(lambda: subscriber.index.match(HASHES) == expected)

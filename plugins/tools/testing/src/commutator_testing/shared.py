"""What several suites use: a worker's record, and waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from commutator import EngineInfo, WorkerRecord

TEST_ENGINE = EngineInfo(
    kind="test",
    version="1",
    model="model",
    max_model_len=4096,
    block_size=16,
    kv_capacity_blocks=1024,
)


def make_record(worker_id: str, info: EngineInfo = TEST_ENGINE, **fields: Any) -> WorkerRecord:
    """The record of a worker that is nowhere; ``fields`` are those of ``WorkerRecord``."""
    fields = {"engine": "engine", "address": "127.0.0.1:1", **fields}
    return WorkerRecord(worker_id=worker_id, kind=info.kind, model=info.model, info=info, **fields)


async def until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until something is true. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)

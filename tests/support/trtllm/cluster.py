"""What tests ask of a cluster whose workers are stand-ins, launched as `trtllm-serve` would be."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

from commutator.contract.registry import WorkerUp
from commutator.contract.worker import EngineLoad
from commutator.registry.client import RegistryClient
from commutator_scaffold.local_cluster import LocalCluster
from commutator_trtllm.client import TrtllmClient

__all__ = ["SERVE", "launched", "load_of"]

SERVE = Path(__file__).resolve().parent / "serve.py"


def launched(checkpoint: str, **options: Any) -> dict[str, Any]:
    """An entry of `engines`."""
    command = [sys.executable, str(SERVE)]
    return {"kind": "trtllm", "command": command, "checkpoint": checkpoint, **options}


async def load_of(cluster: LocalCluster, worker: str) -> EngineLoad:
    """By the server's own statistics, which its sidecar reads.

    Raises LookupError while the worker is not there, and EngineUnavailableError.
    """
    registry = RegistryClient(await _registry(cluster))
    watched = registry.watch()
    assert isinstance(watched, AsyncGenerator)
    present = [change.record for change in await anext(watched) if isinstance(change, WorkerUp)]
    await watched.aclose()
    await registry.close()
    addresses = [record.address for record in present if record.worker_id == worker]
    if not addresses:
        raise LookupError(worker)
    client = TrtllmClient(addresses[0], answer_timeout_s=60)
    try:
        return await client.load()
    finally:
        await client.close()


async def _registry(cluster: LocalCluster) -> str:
    async with asyncio.timeout(300):
        while True:
            with suppress(OSError):  # a busy machine answers late
                return str((await asyncio.to_thread(cluster.health))["registry"])
            await asyncio.sleep(0.2)

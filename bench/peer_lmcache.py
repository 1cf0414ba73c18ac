"""Measures LMCache's local CPU and disk backends; runs in the peer's environment.

``peer_lmcache.py FOLDER BLOCK_KIB TOTAL_MIB ROUNDS``, started by ``bench.tiers``, prints GB/s as
JSON. A block is copied from the engine's memory into LMCache's and back, as its connectors do. What
LMCache does not do, such as checksums, is not asked of it. Imports only the peer and its libraries.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import (
    LocalCPUBackend,
)
from lmcache.v1.storage_backend.local_disk_backend import (
    LocalDiskBackend,
)

LAYERS, TOKENS, DTYPE = 16, 16, torch.bfloat16
TIMEOUT_S = 60


class Measured:
    """Blocks of random bytes, and where they come back to."""

    def __init__(self, block_bytes: int, count: int) -> None:
        hidden = block_bytes // (2 * LAYERS * TOKENS * DTYPE.itemsize)
        self.shape = torch.Size((2, LAYERS, TOKENS, hidden))
        self.total_bytes = count * block_bytes
        raw = torch.randint(0, 255, (count, block_bytes), dtype=torch.uint8)
        self.source = raw.view(DTYPE).view(count, *self.shape)
        self.target = torch.zeros_like(self.source)
        self.keys = [CacheEngineKey("m", 1, 0, number, DTYPE) for number in range(count)]
        self.metadata = LMCacheMetadata(
            model_name="m",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=DTYPE,
            kv_shape=(LAYERS, 2, TOKENS, 1, hidden),
            chunk_size=TOKENS,
        )

    def config(self, **more: object) -> LMCacheEngineConfig:
        room_gb = 4 * self.total_bytes / (1 << 30)
        return LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS, max_local_cpu_size=room_gb, max_local_disk_size=room_gb, **more
        )

    def filled(self, backend: LocalCPUBackend) -> list[Any]:
        """LMCache's own memory with the blocks in it."""
        made = []
        for block in self.source:
            memory = backend.allocate(self.shape, DTYPE, MemoryFormat.KV_2LTD)
            memory.tensor.copy_(block)
            made.append(memory)
        return made

    def check(self) -> None:
        """Raises RuntimeError unless every byte came back."""
        if not torch.equal(self.source.view(torch.uint8), self.target.view(torch.uint8)):
            raise RuntimeError("LMCache brought back other bytes")
        self.target.zero_()


def cpu_rates(blocks: Measured, rounds: int) -> dict[str, float]:
    backend = LocalCPUBackend(blocks.config(local_cpu=True), blocks.metadata, "cpu")

    def store() -> None:
        made = blocks.filled(backend)
        backend.batched_submit_put_task(blocks.keys, made)
        for memory in made:
            memory.ref_count_down()

    def load() -> None:
        for key, target in zip(blocks.keys, blocks.target, strict=True):
            memory = backend.get_blocking(key)
            target.copy_(memory.tensor)
            memory.ref_count_down()

    return rates(backend, blocks, rounds, store, load)


def disk_rates(blocks: Measured, rounds: int, folder: Path) -> dict[str, float]:
    """Past the page cache, as our tier does."""
    config = blocks.config(
        local_cpu=False, local_disk=str(folder), extra_config={"use_odirect": True}
    )
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    memory = LocalCPUBackend(config, blocks.metadata, "cpu")
    backend = LocalDiskBackend(config, loop, memory, "cpu", metadata=blocks.metadata)

    def store() -> None:
        written = threading.Semaphore(0)
        made = blocks.filled(memory)
        backend.batched_submit_put_task(
            blocks.keys, made, on_complete_callback=lambda _: written.release()
        )
        for block in made:
            block.ref_count_down()
        for _ in made:
            if not written.acquire(timeout=TIMEOUT_S):
                raise RuntimeError("LMCache did not write a block")

    def load() -> None:
        found = backend.batched_get_blocking(blocks.keys)
        for block, target in zip(found, blocks.target, strict=True):
            target.copy_(block.tensor)
            block.ref_count_down()

    return rates(backend, blocks, rounds, store, load)


def rates(
    backend: LocalCPUBackend | LocalDiskBackend,
    blocks: Measured,
    rounds: int,
    store: Callable[[], None],
    load: Callable[[], None],
) -> dict[str, float]:
    """GB/s, the median of the rounds; one before them touches memory and files."""
    taken: dict[str, list[float]] = {"store": [], "load": []}
    for _ in range(rounds + 1):
        for name, call in (("store", store), ("load", load)):
            started_s = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - started_s)
        blocks.check()
        for key in blocks.keys:
            backend.remove(key)
    return {
        name: blocks.total_bytes / statistics.median(seconds[1:]) / 1e9
        for name, seconds in taken.items()
    }


def main() -> None:
    folder, block_kib, total_mib, rounds = sys.argv[1:]
    block_bytes = int(block_kib) << 10
    blocks = Measured(block_bytes, (int(total_mib) << 20) // block_bytes)
    found = {
        "dram": cpu_rates(blocks, int(rounds)),
        "nvme": disk_rates(blocks, int(rounds), Path(folder)),
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # its threads do not end


if __name__ == "__main__":
    main()

"""A worker process that exports blocks from its dram tier.

Run as ``python exporter.py COUNT BLOCK_BYTES LEASE_S SEED``; it stores the blocks of
``random_keys(COUNT, SEED)`` and prints its address. Then each line on its input is done and
answered by a line: ``pinned``; ``evict N`` evicts the first N blocks; ``overwrite`` stores other
bytes in all free slots; ``busy S`` keeps the tier's thread from answering.
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.support.tier_mover import block_of, random_keys

from commutator.contract.block import BlockKey
from commutator.contract.tier import ExportOptions, SlotGeometry, StorageTier, StoredBlock
from commutator_dram.tier import DramConfig, DramTier
from commutator_engine_kit.kv.arena import bytes_at, checksum
from commutator_engine_kit.kv.lending import TierExporter
from commutator_engine_kit.nixl.agent import TransferAgent

__all__ = ["Exporter", "exporter", "plain_geometry"]

ROOT = Path(__file__).resolve().parents[2]


def plain_geometry(block_bytes: int, identity: str = "ab" * 32) -> SlotGeometry:
    """Slots for blocks without a header."""
    return SlotGeometry(block_bytes=block_bytes, slot_bytes=block_bytes, identity=identity)


class Exporter:
    """The other end of such a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = self._line()

    def tell(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self._line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def exporter(
    count: int, block_bytes: int, *, lease_s: float = 30.0, seed: int = 0
) -> Iterator[Exporter]:
    arguments = map(str, (count, block_bytes, lease_s, seed))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.exporter", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Exporter(process)
        finally:
            process.kill()


def store(tier: StorageTier, keys: list[BlockKey], blocks: list[bytes]) -> None:
    """Write blocks into memory: what moves them there is not what is tested."""
    slots = tier.reserve(keys)
    stored = []
    for key, slot, block in zip(keys, slots, blocks, strict=True):
        if slot is not None:
            span, _ = tier.place(slot, len(block))
            bytes_at(span)[:] = block
            total = checksum(block)
            stored.append(StoredBlock(key=key, slot=slot, size_bytes=len(block), checksum=total))
    tier.commit(stored)


def main() -> None:
    count, block_bytes, lease_s, seed = sys.argv[1:]
    size = int(block_bytes)
    keys = random_keys(int(count), int(seed))
    tier = DramTier(DramConfig(kind="dram", capacity=(size + 4096) * (int(count) + 1)))
    geometry = plain_geometry(size)
    tier.open(geometry)
    store(tier, keys, [block_of(key, size) for key in keys])
    agent = TransferAgent(f"exporter-{uuid.uuid4().hex}", {tier.backend: {}})
    agent.register(tier.regions(), tier.backend)
    with ThreadPoolExecutor(1) as thread:
        export = TierExporter(
            tier,
            geometry,
            agent_name=agent.name,
            metadata=agent.metadata,
            on_tier=thread.submit,
            options=ExportOptions(lease_s=float(lease_s)),
        )
        print(export.start(), flush=True)
        for line in sys.stdin:
            command, *rest = line.split()
            answer = "done"
            if command == "evict":
                thread.submit(tier.evict, keys[: int(rest[0])]).result()
            elif command == "overwrite":
                strangers = random_keys(int(count) + 1, 12345)
                others = [bytes(size)] * len(strangers)
                thread.submit(store, tier, strangers, others).result()
            elif command == "pinned":
                answer = str(thread.submit(tier.statistics).result().pinned)
            elif command == "busy":
                thread.submit(time.sleep, float(rest[0]))
            print(answer, flush=True)
        export.close()
    agent.close()
    tier.close()


if __name__ == "__main__":
    main()

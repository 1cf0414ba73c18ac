"""Memory of an engine that is not ours: keys and values of each layer in tensors of their own."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Self

from commutator.contract.block import BlockKey, CacheIdentity, KvEvent
from commutator.contract.tier import Memory
from commutator_engine_kit.kv.arena import BlockPart, ScatteredArena
from commutator_engine_kit.kv.connector import KvConnector
from commutator_engine_kit.kv.groups import KvGroup
from commutator_engine_kit.kv.tier_stack import OnboardTicket

__all__ = ["IDENTITY", "LAYERS", "PART_BYTES", "TIMEOUT_S", "ForeignEngine", "dram", "prompt"]

LAYERS = 3
PART_BYTES = 512
BLOCK_TOKENS = 4
TIMEOUT_S = 60.0
IDENTITY = CacheIdentity(
    model="m",
    weights="w",
    tokenizer="t",
    dtype="float32",
    layout="3 layers, keys then values",
    block_size=BLOCK_TOKENS,
)


def dram(capacity: str = "1MB", **options: Any) -> dict[str, Any]:
    return {"kind": "dram", "capacity": capacity, **options}


def prompt(number: int, blocks: int) -> list[int]:
    return [number] * BLOCK_TOKENS * blocks


class ForeignEngine:
    """``blocks`` blocks of ``LAYERS`` times keys and values, and the tiers below them."""

    def __init__(
        self,
        *tiers: dict[str, Any],
        blocks: int = 16,
        identity: CacheIdentity = IDENTITY,
        groups: Sequence[KvGroup] = (),
        file: Path | None = None,
        wake: Callable[[], None] = lambda: None,
        own_thread: bool = True,
    ) -> None:
        self._layers = [mmap.mmap(-1, 2 * blocks * PART_BYTES) for _ in range(LAYERS)]
        bases = [ctypes.addressof(ctypes.c_char.from_buffer(layer)) for layer in self._layers]
        arena = ScatteredArena(
            memory=Memory.DRAM,
            parts=tuple(
                BlockPart(
                    address=base + side * blocks * PART_BYTES,
                    size_bytes=PART_BYTES,
                    stride_bytes=PART_BYTES,
                )
                for base in bases
                for side in range(2)
            ),
            count=blocks,
        )
        self.connector = KvConnector(
            file or tiers, arena, identity, worker_id="foreign-0", groups=groups, wake=wake
        )
        self.events: list[KvEvent] = []
        self._own_thread = own_thread
        self._blocks = blocks

    def compute(self, block: int, key: BlockKey) -> None:
        """Fill a block with the bytes that its key stands for."""
        whole = _content(key)
        for part in range(2 * LAYERS):
            self._part(block, part)[:] = whole[part * PART_BYTES : (part + 1) * PART_BYTES]

    def scribble(self, block: int) -> None:
        for part in range(2 * LAYERS):
            self._part(block, part)[:] = b"\xee" * PART_BYTES

    def holds(self, block: int, key: BlockKey) -> bool:
        return b"".join(self._part(block, part) for part in range(2 * LAYERS)) == _content(key)

    def store(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """Compute a prompt into the first blocks, and keep it."""
        keys = self.connector.lookups.keys(token_ids)
        for block, key in enumerate(keys):
            self.compute(block, key)
        blocks = self.connector.stores.descriptors(keys, token_ids)
        self.connector.stores.offload(blocks, range(len(keys))).result(TIMEOUT_S)
        return keys

    def plan(self, keys: Sequence[BlockKey], first: int = 0) -> OnboardTicket:
        return self.connector.lookups.plan(keys, first=first).result(TIMEOUT_S)

    def load(self, keys: Sequence[BlockKey]) -> int:
        """How many of a chain's first blocks come back, each with the right bytes."""
        plan = self.plan(keys)
        if not plan.blocks:
            return 0
        blocks = range(plan.blocks)
        for block in blocks:
            self.scribble(block)
        good = self.connector.loads.onboard(plan, blocks).result(TIMEOUT_S)
        for block, key, loaded in zip(blocks, keys, good, strict=False):
            assert not loaded or self.holds(block, key)
        return sum(good)

    def __enter__(self) -> Self:
        self.connector.start()
        if self._own_thread:
            self.connector.poll_on_own_thread(self.events.extend)
        return self

    def __exit__(self, *_: object) -> None:
        self.connector.close()

    def _part(self, block: int, part: int) -> memoryview:
        layer, side = divmod(part, 2)
        start = (side * self._blocks + block) * PART_BYTES
        return memoryview(self._layers[layer])[start : start + PART_BYTES]


def _content(key: BlockKey) -> bytes:
    return Random(key).randbytes(2 * LAYERS * PART_BYTES)

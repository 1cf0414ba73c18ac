"""What hand-overs between served sim workers need: their words, and a mover that takes time only.

The control protocol is that of the engines that move bytes; here a transfer is a wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from commutator.engine.handover import PROTOCOL, PromptBlock, Source, Target
from commutator.types import HandoverInfo
from commutator_sim.config import SimConfig

__all__ = ["WaitingMover", "handover_info", "handover_source"]


def handover_info(config: SimConfig, model: str) -> HandoverInfo:
    """Modelled blocks are of use to other sim workers only."""
    return HandoverInfo(
        protocol=f"{PROTOCOL}, modelled",
        identity=f"sim: {model}",
        block_size=config.block_size,
        token_bytes=config.kv_bytes_per_token,
    )


def handover_source(config: SimConfig, info: HandoverInfo, agent: str) -> Source:
    """A worker's modelled memory; nobody reads it."""
    return Source(
        info=info,
        agent=agent,
        metadata=b"",
        memory="DRAM",
        address=0,
        block_bytes=config.block_size * config.kv_bytes_per_token,
        blocks=config.kv_capacity_blocks,
    )


class WaitingMover:
    """A link that carries one transfer after the other. Used from one event loop."""

    def __init__(self, config: SimConfig) -> None:
        self._bytes_per_s = config.handover_bandwidth_bytes_per_s
        self._latency_s = config.handover_latency_s
        self._factor = config.time_factor
        self._free_s = 0.0

    async def fetch(
        self, source: Source, blocks: Sequence[PromptBlock], target: Target, timeout_s: float
    ) -> list[str | None]:
        """Wait for as long as the bytes would take."""
        target.begin()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self._takes_s(len(blocks) * source.block_bytes))
        except TimeoutError:
            return [f"not there after {timeout_s:g} s"] * len(blocks)
        finally:
            target.end()
        return [None] * len(blocks)

    @property
    def nixl_bytes(self) -> int:
        return 0

    def forget(self, source: Source) -> None:
        """There is nothing to forget."""

    def _takes_s(self, size_bytes: int) -> float:
        """In real seconds; no time passes at unlimited speed."""
        if not self._factor:
            return 0.0
        now_s = asyncio.get_running_loop().time()
        moving_s = size_bytes / self._bytes_per_s / self._factor
        self._free_s = max(self._free_s, now_s) + moving_s
        return self._free_s + self._latency_s / self._factor - now_s

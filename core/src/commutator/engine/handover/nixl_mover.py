"""Reads blocks out of other workers' memory by NIXL, in several lanes at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

from commutator.engine.handover.mover import PromptBlock, Target
from commutator.engine.handover.pull_words import Source
from commutator.engine.handover.read_lane import ReadLane
from commutator.kv.arena import BlockArena
from commutator.transfer import Memory

__all__ = ["NixlMover"]

_LANES = 2
"""Within a machine a CPU copies what is read, at half to two thirds of what memory can give."""
_WORTH_BYTES = 2 << 20
"""For each lane: less is there sooner than another thread wakes up."""


class NixlMover:
    """A ``BlockMover`` between arenas in host memory. It serves both sides of a worker.

    Its threads and agents are made when they are first needed: a worker that hands nothing over
    does without.
    """

    def __init__(
        self,
        arena: BlockArena,
        *,
        block_tokens: int,
        runs: int,
        agent_name: str,
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        """``agent_name`` is unique among all processes that exchange blocks.

        ``parameters`` are those of NIXL's backend UCX.
        """
        if arena.memory is not Memory.DRAM:
            raise ValueError(f"blocks are handed over in host memory only, not in {arena.memory}")
        names = [agent_name, *(f"{agent_name}-{number}" for number in range(1, _LANES))]
        self._lanes = [
            ReadLane(
                arena,
                block_tokens=block_tokens,
                runs=runs,
                agent_name=name,
                parameters=dict(parameters or {}),
            )
            for name in names[: len(os.sched_getaffinity(0))]
        ]
        self._next = 0

    def metadata(self) -> bytes:
        """What another agent must know to read our arena. Waits; raises TransferError."""
        return self._lanes[0].metadata()

    async def fetch(
        self, source: Source, blocks: Sequence[PromptBlock], target: Target, timeout_s: float
    ) -> list[str | None]:
        parts = min(len(self._lanes), max(1, len(blocks) * source.block_bytes // _WORTH_BYTES))
        each = max(1, -(-len(blocks) // parts))
        fetches = []
        for first in range(0, len(blocks), each):
            lane = self._lanes[self._next % len(self._lanes)]
            self._next += 1
            fetches.append(lane.fetch(source, blocks[first : first + each], target, timeout_s))
        found = await asyncio.gather(*fetches)
        return [outcome for part in found for outcome in part]

    @property
    def nixl_bytes(self) -> int:
        return sum(lane.nixl_bytes for lane in self._lanes)

    def forget(self, source: Source) -> None:
        for lane in self._lanes:
            lane.forget(source)

    def close(self) -> None:
        """Wait for what is under way, a few seconds at most; from no lane's thread."""
        for lane in self._lanes:
            lane.close()

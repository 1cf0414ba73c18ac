"""Reads blocks out of other workers' memory by NIXL, in several lanes at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from commutator.engine.handover.geometry import BlockShapes
from commutator.engine.handover.mover import PromptBlock, Target
from commutator.engine.handover.pull_words import Source
from commutator.engine.handover.read_lane import ReadLane
from commutator.kv.arena import BlockArena
from commutator.transfer import Memory, lane_names, lanes_worth, shares

__all__ = ["NixlMover"]


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
        self._block_tokens = block_tokens
        self._runs = runs
        self._lanes = [
            ReadLane(arena, agent_name=name, parameters=dict(parameters or {}))
            for name in lane_names(agent_name)
        ]
        self._next = 0

    def metadata(self) -> bytes:
        """What another agent must know to read our arena. Waits; raises TransferError."""
        return self._lanes[0].metadata()

    async def fetch(
        self, source: Source, blocks: Sequence[PromptBlock], target: Target, timeout_s: float
    ) -> list[str | None]:
        info = source.info
        shapes = BlockShapes(info.block_size, self._block_tokens, info.token_bytes, self._runs)
        size_bytes = len(blocks) * source.block_bytes
        fetches = []
        for part in shares(len(blocks), lanes_worth(len(blocks), size_bytes, len(self._lanes))):
            lane = self._lanes[self._next % len(self._lanes)]
            self._next += 1
            mine = blocks[part.start : part.stop]
            fetches.append(lane.fetch(source, mine, shapes, target, timeout_s))
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

"""Which bytes are read from where to where, for blocks of a prompt. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen

from commutator.engine.handover.geometry import BlockShapes
from commutator.engine.handover.mover import PromptBlock, Target
from commutator.engine.handover.pull_words import Source
from commutator.kv.arena import BlockArena
from commutator.transfer import BlockMove, Span

__all__ = ["ReadPlan", "plan_reads"]


@frozen
class ReadPlan:
    """What to move."""

    moves: list[BlockMove] = field(factory=list)
    owners: list[int] = field(factory=list)
    """For each move, which of the blocks it is a piece of."""
    pieces: list[list[Span]] = field(factory=list)
    """For each block, its pieces in our memory, in their order in the source."""


def plan_reads(
    source: Source,
    blocks: Sequence[PromptBlock],
    target: Target,
    shapes: BlockShapes,
    arena: BlockArena,
) -> ReadPlan:
    """Raises ValueError or IndexError for blocks that are not there, or not wanted."""
    plan = ReadPlan()
    first = target.first_token // shapes.target_tokens
    # Reads of thousands of blocks are planned while nothing moves: no step is made twice.
    patterns = [shapes.pieces(phase) for phase in range(shapes.period)]
    addresses = [arena.address_of(block) for block in target.blocks]
    device = arena.device
    for owner, (position, ready) in enumerate(blocks):
        if not 0 <= ready.index < source.blocks:
            raise ValueError(f"the prefill worker has no block {ready.index}")
        remote_address = source.address + ready.index * source.block_bytes
        target_block = shapes.target_block(position) - first
        pieces = []
        for offset, block, target_offset, size_bytes in patterns[position % shapes.period]:
            place = target_block + block
            if not 0 <= place < len(addresses):
                raise ValueError(f"block {position} of the prompt is not wanted")
            local = Span(addresses[place] + target_offset, size_bytes, device)
            remote = Span(remote_address + offset, size_bytes, source.device)
            plan.moves.append(BlockMove(local, remote))
            plan.owners.append(owner)
            pieces.append(local)
        plan.pieces.append(pieces)
    return plan

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
    for owner, (position, ready) in enumerate(blocks):
        if not 0 <= ready.index < source.blocks:
            raise ValueError(f"the prefill worker has no block {ready.index}")
        remote_address = source.address + ready.index * source.block_bytes
        target_block = shapes.target_block(position) - first
        pieces = []
        for piece in patterns[position % shapes.period]:
            place = target_block + piece.target_block
            if not 0 <= place < len(target.blocks):
                raise ValueError(f"block {position} of the prompt is not wanted")
            address = arena.address_of(target.blocks[place]) + piece.target_offset
            local = Span(address, piece.size_bytes, arena.device)
            remote = Span(remote_address + piece.source_offset, piece.size_bytes, source.device)
            plan.moves.append(BlockMove(local, remote))
            plan.owners.append(owner)
            pieces.append(local)
        plan.pieces.append(pieces)
    return plan

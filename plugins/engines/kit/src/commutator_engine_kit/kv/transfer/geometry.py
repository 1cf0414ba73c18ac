"""Maps blocks of one size to blocks of another. No I/O."""

from __future__ import annotations

from typing import NamedTuple

from attrs import frozen

__all__ = ["BlockShapes", "Piece", "convertible"]


def convertible(one_tokens: int, other_tokens: int) -> bool:
    """Whether blocks of one size can be read as blocks of the other: one must divide the other."""
    smaller, larger = sorted((one_tokens, other_tokens))
    return smaller >= 1 and larger % smaller == 0


class Piece(NamedTuple):
    """A piece of a block that is contiguous in the source and in the target."""

    source_offset: int
    """Offset in the source block."""
    target_block: int
    """Number of the target block, counted from the one in which the source block begins."""
    target_offset: int
    size_bytes: int


@frozen
class BlockShapes:
    """Two block sizes, of which one divides the other, with the same number of bytes for a token.

    A block consists of ``runs`` runs of equal size; each run has a part of every token, in order.
    """

    source_tokens: int
    target_tokens: int
    token_bytes: int
    runs: int = 1

    @property
    def unit_tokens(self) -> int:
        """The larger of the two block sizes: the smallest unit of whole blocks on both sides."""
        return max(self.source_tokens, self.target_tokens)

    def aligned(self, tokens: int) -> int:
        """``tokens``, rounded down to whole units."""
        return tokens // self.unit_tokens * self.unit_tokens

    @property
    def period(self) -> int:
        """The pieces of source blocks repeat after this number of blocks."""
        return max(1, self.target_tokens // self.source_tokens)

    def target_block(self, source_block: int) -> int:
        """The prompt's target block in which a source block begins."""
        return source_block * self.source_tokens // self.target_tokens

    def pieces(self, source_block: int) -> list[Piece]:
        """The pieces of one of the prompt's source blocks, in their order in it."""
        source, target = self.source_tokens, self.target_tokens
        if source == target:
            return [Piece(0, 0, 0, source * self.token_bytes)]
        step = min(source, target)
        run_token_bytes = self.token_bytes // self.runs
        skipped = source_block * source % target
        return [
            Piece(
                source_offset=(run * source + token) * run_token_bytes,
                target_block=(skipped + token) // target,
                target_offset=(run * target + (skipped + token) % target) * run_token_bytes,
                size_bytes=step * run_token_bytes,
            )
            for run in range(self.runs)
            for token in range(0, source, step)
        ]

"""Where a prompt's tokens lie in one worker's blocks and in another's. Pure arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from attrs import frozen

__all__ = ["BlockShapes", "Piece", "convertible"]


def convertible(one_tokens: int, other_tokens: int) -> bool:
    """Whether blocks of one size become blocks of the other: one must divide the other."""
    smaller, larger = sorted((one_tokens, other_tokens))
    return smaller >= 1 and larger % smaller == 0


class Piece(NamedTuple):
    """Bytes that are contiguous on both sides."""

    source_offset: int
    """From the beginning of the source block."""
    target_block: int
    """Counted from the one in which the source block begins."""
    target_offset: int
    size_bytes: int


@frozen
class BlockShapes:
    """Blocks of two sizes, of which one divides the other; with the same bytes for each token.

    A block is ``runs`` runs of equal size; each has something of all the block's tokens, in order.
    """

    source_tokens: int
    target_tokens: int
    token_bytes: int
    runs: int = 1

    @property
    def unit_tokens(self) -> int:
        """Prompts are handed over in whole pieces of so many tokens."""
        return max(self.source_tokens, self.target_tokens)

    def aligned(self, tokens: int) -> int:
        """The last such piece's end that is not after ``tokens``."""
        return tokens // self.unit_tokens * self.unit_tokens

    @property
    def period(self) -> int:
        """Source blocks so far apart have the same pieces."""
        return max(1, self.target_tokens // self.source_tokens)

    def target_block(self, source_block: int) -> int:
        """In which of the prompt's target blocks a source block begins."""
        return source_block * self.source_tokens // self.target_tokens

    def pieces(self, source_block: int) -> list[Piece]:
        """All bytes of the prompt's block of this number, in their order in the source."""
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

"""What one engine step computes: a value that the scheduler makes and the model reads."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve, frozen

__all__ = ["Chunk", "Step"]


@frozen
class Chunk:
    """Consecutive tokens of one request whose KV is to be computed."""

    key: int
    token_ids: tuple[int, ...]
    start: int
    """Position of the first of these tokens in its sequence."""
    block_table: tuple[int, ...]
    """Blocks of the sequence, in order; block i holds positions [i * size, (i + 1) * size)."""
    samples: bool
    """Whether the sequence ends here, so that its next token is to be chosen."""

    @property
    def end(self) -> int:
        """Position after the last of these tokens."""
        return self.start + len(self.token_ids)


@frozen
class Step:
    """The chunks of one forward pass, those of a single token first."""

    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[int, ...] = ()
    """Requests that lost their blocks to make room; they are waiting again."""

    def without(self, keys: Iterable[int]) -> Step:
        """The same, less the chunks of some requests."""
        gone = set(keys)
        return evolve(self, chunks=tuple(c for c in self.chunks if c.key not in gone))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of chunks with more than one."""
        return sum(len(c.token_ids) for c in self.chunks if len(c.token_ids) > 1)

"""How the bytes of handed-over blocks get here: the contract between asking and moving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import define

from commutator.engine.handover.pull_words import ReadyBlock, Source

__all__ = ["BlockMover", "PromptBlock", "Target"]

PromptBlock = tuple[int, ReadyBlock]
"""The how-manieth block of the prompt, as the source cuts it, and where it is there."""


@define(eq=False)
class Target:
    """Blocks of ours that a prompt's blocks are read into. Used from one event loop."""

    first_token: int
    """Where in the prompt the first of the blocks begins; both sides' blocks begin there."""
    end_token: int
    """What comes after it is not wanted."""
    blocks: Sequence[int]
    on_let_go: Callable[[], None] = lambda: None
    """Called each time when nothing touches them any more."""
    under_way: int = 0

    def begin(self) -> None:
        """Something may write to the blocks from now on."""
        self.under_way += 1

    def end(self) -> None:
        """The inverse of ``begin``."""
        self.under_way -= 1
        if not self.under_way:
            self.on_let_go()


class BlockMover(Protocol):
    """Moves bytes, or models the time that it takes."""

    async def fetch(
        self, source: Source, blocks: Sequence[PromptBlock], target: Target, timeout_s: float
    ) -> list[str | None]:
        """Read these blocks and verify each; return for each None, or why it is not there.

        May be called again before it has returned. When cancelled, it gives up; ``target.end`` is
        called as often as ``target.begin``, each time once nothing writes there any more.
        """
        ...

    @property
    def nixl_bytes(self) -> int:
        """What NIXL's own telemetry says it has moved. Any thread may ask."""
        ...

    def forget(self, source: Source) -> None:
        """That process will not be read from again."""

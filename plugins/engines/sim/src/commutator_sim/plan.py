"""What the model has decided about its next steps."""

from __future__ import annotations

from attrs import define

from commutator_sim.request import Run

__all__ = ["Chunks", "Plan"]


@define
class Plan:
    """Equal steps that are decided: the first may be under way, the others follow it."""

    step_ns: int
    count: int
    decoding: int
    chunks: Chunks


class Chunks:
    """Prefilling runs of one step, each with its epoch and its tokens in the step."""

    def __init__(self, budget: int) -> None:
        """``budget`` is in tokens."""
        self.left = budget
        self.tokens = 0
        self.all: list[tuple[Run, int, int]] = []

    def add(self, run: Run) -> None:
        """As much of ``run`` as the budget allows."""
        tokens = min(self.left, run.target - run.computed)
        self.all.append((run, run.epoch, tokens))
        self.left -= tokens
        self.tokens += tokens

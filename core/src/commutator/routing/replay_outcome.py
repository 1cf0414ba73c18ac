"""What a replay measured."""

from __future__ import annotations

from collections import Counter

from attrs import define, field

__all__ = ["Finished", "Outcome"]


@define
class Finished:
    """One request of the trace, with its times in seconds."""

    worker_id: str
    """Where it was decoded."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_s: float
    duration_s: float

    @property
    def itl_s(self) -> float:
        """Mean time between its tokens."""
        return (self.duration_s - self.ttft_s) / max(1, self.output_tokens - 1)


@define
class Outcome:
    """Everything that a report is made from."""

    finished: list[Finished] = field(factory=list)
    intervals: dict[int, int] = field(factory=dict)
    """Inter-token latency in ns to the number of tokens that came with it."""
    computed_tokens: Counter[str] = field(factory=Counter)
    """Prompt tokens computed, by worker."""
    tokens_given_up: int | None = None
    """Prompt tokens that another worker held beyond the chosen one's: the price of balance.

    None for a policy that is not told what workers hold.
    """
    decisions: Counter[tuple[bool, str]] = field(factory=Counter)
    """Whether prefill and decode were apart, and why; empty without prefill workers."""
    not_taken: int = 0
    """Of those that were to be apart, those that no prefill worker took in time."""
    handed_over_tokens: int = 0
    duration_s: float = 0.0

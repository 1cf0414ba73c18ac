"""Figures of one replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import field, frozen

from commutator.contract.planner import PlannerTargets
from commutator_replay.replay import Outcome


@frozen
class Report:
    """What clients would have seen, under one policy."""

    policy: str
    requests: int
    """Requests that were answered."""
    cached_ratio: float
    """Prompt tokens found in a cache, of all prompt tokens."""
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    imbalance: float
    """Prompt tokens computed by the busiest worker, over the mean of all."""
    good_ratio: float
    """Part of the requests, refused ones included, that met both targets."""
    goodput_per_s: float
    """Requests a second that met both targets."""
    given_up_ratio: float | None
    """Prompt tokens that another worker held beyond the chosen one's, of all: reuse for balance.

    None for a policy that does not use overlaps.
    """
    separate_ratio: float | None = None
    """Part of the requests that prefill workers prefilled; None without prefill workers."""
    handed_over_ratio: float = 0.0
    """Prompt tokens whose KV went from one worker to another, of all prompt tokens."""
    refused: int = 0
    """Requests that found the queue full, or waited too long, because every worker was busy."""
    decisions: Mapping[str, int] = field(factory=dict)
    """Requests by whether they were prefilled elsewhere, and why."""


def report(policy: str, outcome: Outcome, targets: PlannerTargets) -> Report:
    """Sum up one replay."""
    done = outcome.finished
    computed = outcome.computed_tokens
    ttfts = sorted(one.ttft_s for one in done)
    good = sum(one.ttft_s <= targets.ttft_s and one.itl_s <= targets.itl_s for one in done)
    prompt_tokens = sum(one.prompt_tokens for one in done)
    given_up = outcome.tokens_given_up
    return Report(
        policy=policy,
        requests=len(done),
        cached_ratio=sum(one.cached_tokens for one in done) / max(1, prompt_tokens),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p99_s=percentile(ttfts, 0.99),
        itl_p50_s=weighted_percentile(outcome.intervals, 0.5) / 1e9,
        itl_p99_s=weighted_percentile(outcome.intervals, 0.99) / 1e9,
        imbalance=max(computed.values(), default=0)
        * len(computed)
        / max(1, sum(computed.values())),
        good_ratio=good / max(1, len(done) + outcome.refused),
        goodput_per_s=good / max(outcome.duration_s, 1e-9),
        given_up_ratio=None if given_up is None else given_up / max(1, prompt_tokens),
        separate_ratio=_separate_ratio(outcome),
        handed_over_ratio=outcome.handed_over_tokens / max(1, prompt_tokens),
        refused=outcome.refused,
        decisions={
            f"{'separate' if separate else 'local'}, {reason}": count
            for (separate, reason), count in sorted(outcome.decisions.items())
        },
    )


def _separate_ratio(outcome: Outcome) -> float | None:
    asked = outcome.decisions.total()
    if not asked:
        return None
    separate = sum(count for (elsewhere, _), count in outcome.decisions.items() if elsewhere)
    return (separate - outcome.not_taken) / asked


def percentile(ordered: Sequence[float], part: float) -> float:
    """The value below which ``part`` of the ordered values lie; 0 for none."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def weighted_percentile(counts: Mapping[int, int], part: float) -> float:
    """The same of values with the number of times that each occurs."""
    left = part * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left < 0:
            return float(value)
    return float(max(counts, default=0))

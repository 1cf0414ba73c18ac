"""Whether a request's prefill is worth a worker of its own: the contract of the policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from attrs import field, frozen

from commutator.routing.contract import WorkerLoad

__all__ = ["DisaggAnswer", "DisaggPolicy", "DisaggQuestion", "MeasuredSpeeds"]


@frozen
class MeasuredSpeeds:
    """What this front door has seen of its workers; None where it has seen nothing yet."""

    prefill_tokens_per_s: float | None = None
    """Of a prefill worker alone with a prompt."""
    local_prefill_tokens_per_s: float | None = None
    """Of a decode worker that computes a prompt beside its answers."""
    handover_bytes_per_s: float | None = None
    handover_latency_s: float | None = None
    """What a hand-over costs beside its bytes."""


@frozen
class DisaggQuestion:
    """One request, the decode worker that was chosen for it, and the prefill pool."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the decode worker is thought to hold."""
    decode_load: WorkerLoad
    """Of the decode worker, this request not among it."""
    prefill_loads: Mapping[str, WorkerLoad]
    """Of every prefill worker that could take it, by worker id; never empty."""
    prefill_cached_tokens: int
    """Prompt tokens that the best of them is thought to hold."""
    queued_prefills: int
    """Requests that wait because every prefill worker is busy."""
    queue_age_s: float
    """How long the oldest of them has waited; 0 without any."""
    token_bytes: int
    """KV bytes of one token."""
    speeds: MeasuredSpeeds = MeasuredSpeeds()

    @property
    def uncached_tokens(self) -> int:
        """What the decode worker would have to compute."""
        return max(0, self.prompt_tokens - self.cached_tokens)


@frozen
class DisaggAnswer:
    """Whether to prefill elsewhere, and why."""

    separate: bool
    reason: str
    """One or two words, for metrics: "short prompt", "queue full"."""
    terms: Mapping[str, float] = field(factory=dict)
    """The numbers that decided, for people."""


class DisaggPolicy(ABC):
    """Decides for each request. It does no I/O and reads no clock.

    One instance serves one model in one front-door process. The same instance serves the live
    system and the simulator.
    """

    @abstractmethod
    def decide(self, question: DisaggQuestion) -> DisaggAnswer:
        """Asked only when some prefill worker is up and not draining."""

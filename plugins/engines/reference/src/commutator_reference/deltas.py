"""The last delta of a request, by how it came to its end."""

from __future__ import annotations

from attrs import evolve

from commutator.types import FinishReason, TokenDelta
from commutator_reference.sequence import Sequence
from commutator_reference.stopping import Stop

__all__ = ["ended", "failed", "handed_over", "not_handed_over"]


def ended(delta: TokenDelta, stop: Stop) -> TokenDelta:
    """The newest delta, as the last one."""
    return evolve(delta, finish_reason=stop.finish_reason, stop_reason=stop.stop_reason)


def failed(error: Exception) -> TokenDelta:
    """Something went wrong here."""
    return TokenDelta(finish_reason=FinishReason.ERROR, error=f"{type(error).__name__}: {error}")


def handed_over(sequence: Sequence) -> TokenDelta:
    """A prefill for another worker is done; it has no tokens of its own."""
    return TokenDelta(finish_reason=FinishReason.LENGTH, cached_tokens=sequence.cached_tokens or 0)


def not_handed_over(why: str) -> TokenDelta:
    """Another worker's prefill did not arrive, or nobody wants this one's."""
    return TokenDelta(
        finish_reason=FinishReason.ERROR, error=f"hand-over: {why}", handover_failed=True
    )

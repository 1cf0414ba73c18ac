"""What is told of requests whose prefill and decode are apart, for metrics."""

from __future__ import annotations

from typing import Literal, Protocol

__all__ = ["HandoverObserver", "LegOutcome", "NoHandoverObserver"]

LegOutcome = Literal["done", "failed", "cancelled", "refused"]


class HandoverObserver(Protocol):
    """What hears of them."""

    def decided(self, model: str, separate: bool, reason: str) -> None:
        """Whether to prefill elsewhere, and why."""

    def prefill_queued(self, model: str, seconds: float) -> None:
        """A request got a prefill worker after so long."""

    def leg_ended(self, model: str, leg: Literal["prefill", "decode"], outcome: LegOutcome) -> None:
        """One of the two; that of the decode leg is whether the KV arrived."""

    def handed_over(self, model: str, seconds: float, size_bytes: int) -> None:
        """From the end of the prefill leg to the decode leg's first token."""

    def cancelled(self, model: str, seconds: float) -> None:
        """From one leg's failure until the other was stopped."""


class NoHandoverObserver:
    """Nobody asked."""

    def decided(self, model: str, separate: bool, reason: str) -> None: ...

    def prefill_queued(self, model: str, seconds: float) -> None: ...

    def leg_ended(
        self, model: str, leg: Literal["prefill", "decode"], outcome: LegOutcome
    ) -> None: ...

    def handed_over(self, model: str, seconds: float, size_bytes: int) -> None: ...

    def cancelled(self, model: str, seconds: float) -> None: ...

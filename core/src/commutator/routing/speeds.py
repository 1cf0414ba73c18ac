"""How fast prefill and hand-over have been lately, from what single requests took. Pure."""

from __future__ import annotations

from attrs import define, field

from commutator.routing.disagg import MeasuredSpeeds

__all__ = ["Line", "Rate", "SpeedMeter"]

_KEPT = 0.95
"""What a sample still weighs after the next one: about twenty of them count."""


@define
class Rate:
    """Amount over time; long samples count for more than short ones."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.amount = self.amount * _KEPT + amount
        self.seconds = self.seconds * _KEPT + seconds

    @property
    def per_s(self) -> float | None:
        """None without samples."""
        return self.amount / self.seconds if self.amount > 0 and self.seconds > 0 else None


@define
class Line:
    """Least squares through (bytes, seconds): a latency, and seconds a byte beyond it."""

    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.count, self.x, self.y = self.count * _KEPT + 1, self.x * _KEPT + x, self.y * _KEPT + y
        self.xx, self.xy = self.xx * _KEPT + x * x, self.xy * _KEPT + x * y

    def fit(self) -> tuple[float | None, float | None]:
        """(latency in seconds, bytes a second); None for what the samples do not tell.

        Without samples of different sizes all the time is the bytes'; without a rise it is latency.
        """
        if not self.count:
            return None, None
        spread = self.count * self.xx - self.x * self.x
        all_bytes = self.x / self.y if self.x > 0 and self.y > 0 else None
        if spread <= 1e-6 * self.count * self.xx:
            return None, all_bytes
        slope = (self.count * self.xy - self.x * self.y) / spread
        if slope <= 0:
            return self.y / self.count, None
        latency_s = (self.y - slope * self.x) / self.count
        return (latency_s, 1 / slope) if latency_s > 0 else (0.0, all_bytes)


@define
class SpeedMeter:
    """One model's, in one front door.

    A worker computes prompts in the order in which they came, so a sample of prefill is everything
    that was before it at the worker and itself, over the time to its end.
    """

    prefill: Rate = field(factory=Rate)
    local_prefill: Rate = field(factory=Rate)
    handover: Line = field(factory=Line)

    def speeds(self) -> MeasuredSpeeds:
        latency_s, bytes_per_s = self.handover.fit()
        return MeasuredSpeeds(
            prefill_tokens_per_s=self.prefill.per_s,
            local_prefill_tokens_per_s=self.local_prefill.per_s,
            handover_bytes_per_s=bytes_per_s,
            handover_latency_s=latency_s,
        )

"""Recent speeds of prefill and hand-over, measured from single requests. Does no I/O."""

from __future__ import annotations

from attrs import define, field

from commutator.contract.disagg import MeasuredSpeeds

__all__ = [
    "Line",
    "Rate",
    "SpeedMeter",
]

_DECAY = 0.95
"""The factor by which each new sample reduces the weight of older ones; about twenty count."""


@define
class Rate:
    """An amount per second, such as tokens. Long samples weigh more than short ones."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.amount = self.amount * _DECAY + amount
        self.seconds = self.seconds * _DECAY + seconds

    @property
    def per_s(self) -> float | None:
        """None without samples."""
        return self.amount / self.seconds if self.amount > 0 and self.seconds > 0 else None


@define
class Line:
    """Seconds as a linear function of bytes, by least squares: a latency and a bandwidth."""

    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.count = self.count * _DECAY + 1
        self.x, self.y = self.x * _DECAY + x, self.y * _DECAY + y
        self.xx, self.xy = self.xx * _DECAY + x * x, self.xy * _DECAY + x * y

    def fit(self) -> tuple[float | None, float | None]:
        """(latency in seconds, bytes per second); None for what the samples do not show.

        If all samples have one size, all time counts for the bytes. If larger ones take no longer,
        all time counts as latency.
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
    """The speeds of one model, as measured by one front door.

    A worker prefills prompts in order of arrival. So a prefill sample is the tokens of the prompt
    and of those before it at the worker, over the time until the prompt is done.
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

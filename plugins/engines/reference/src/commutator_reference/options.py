"""How a reference engine is sized."""

from __future__ import annotations

from attrs import field, frozen

from commutator_reference.scheduler import SchedulerLimits

__all__ = ["EngineOptions"]


@frozen(kw_only=True)
class EngineOptions:
    """Sizes and limits of one engine."""

    num_blocks: int
    """KV blocks in the arena; ``arena.block_bytes`` tells how big one is."""
    block_size: int = 16
    """Tokens in one KV block."""
    limits: SchedulerLimits = field(factory=SchedulerLimits)
    max_queued_requests: int = 1024
    """Requests that may wait beside those that can run; one more is refused as overload."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; by default what model and arena allow."""
    prefix_caching: bool = True

    def __attrs_post_init__(self) -> None:
        for name in ("num_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

"""How a worker lends the blocks in its host memory to others."""

from __future__ import annotations

from attrs import frozen

__all__ = ["ExportOptions"]


@frozen(kw_only=True)
class ExportOptions:
    """Where to listen, and how much is lent for how long."""

    listen: str = "tcp://127.0.0.1:*"
    advertise: str | None = None
    """The host that others are told instead of the one listened on."""
    lease_s: float = 30.0
    max_leased_blocks: int = 4096
    """Of all readers together: what is lent cannot be evicted."""
    answer_timeout_s: float = 1.0
    """The tier's thread may be busy; a reader does not wait for longer anyway."""

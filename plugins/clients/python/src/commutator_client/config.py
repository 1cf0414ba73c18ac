"""Where a deployment is, and how patient its client is."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """All times are in seconds. Raises ValueError for what cannot be meant."""

    base_url: str = "http://localhost:8000"
    """The door's address, with or without `/v1` at its end."""
    api_key: str | None = field(default=None, repr=False)
    """None: the deployment has no keys."""
    timeout: float = 30.0
    """To connect, and how long a stream or a short call may be silent."""
    max_retries: int = 3
    """How often a request is sent again, after the first time."""
    retry_delay: float = 1.0
    """Before the first retry, where the server names no time; doubled before each further one."""
    answer_timeout: float = 600.0
    """For an answer that comes whole: a long one takes minutes, without a sign until then."""
    max_retry_wait: float = 60.0
    """A server that asks for a longer wait is not asked again: the error says when it may be."""
    model: str | None = None
    """Which model ``"default"`` is; None: the only one that the deployment serves."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(
                f"base_url: expected an address such as http://localhost:8000, got "
                f"{self.base_url!r}"
            )
        for name in ("timeout", "answer_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected more than 0 s, got {getattr(self, name)}")
        for name in ("max_retries", "retry_delay", "max_retry_wait"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")

    @property
    def root_url(self) -> str:
        """The door's address without `/v1` and without a slash at its end."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

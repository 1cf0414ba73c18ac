"""What is known of one HTTP request while it is served, for its log line and metrics."""

from __future__ import annotations

import json
import random
import re
import time

from aiohttp import web
from attrs import define, field

from commutator.frontend.services import Services

__all__ = ["EXCHANGE", "Exchange", "request_id_of"]

_ID_BITS = 128
_SANE_ID = re.compile(r"[!-~]{1,128}")


@define
class Exchange:
    """Filled in on the way; read once at the end."""

    services: Services
    request_id: str
    endpoint: str
    arrived_s: float = field(factory=time.perf_counter)
    model: str = ""
    """Set once it is known to be a model that is served."""
    user: str | None = None
    begun: web.StreamResponse | None = None
    """The response whose headers are sent: what fails from then on can only end it."""
    ended: bool = False
    """Its last bytes are written, though perhaps not sent."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float | None = None
    workers: tuple[str, ...] = ()
    headers: dict[str, str] = field(factory=dict)
    """What the response will carry beside its own headers."""

    def log_line(self, code: int, duration_s: float) -> str:
        """One line, values that clients chose quoted."""
        parts = [f"{self.endpoint} {code} id={self.request_id} took={duration_s:.3f}s"]
        if self.model:
            parts.append(f"model={self.model}")
        if self.workers:
            parts.append(f"worker={','.join(self.workers)}")
            parts.append(
                f"tokens={self.prompt_tokens}+{self.generated_tokens} cached={self.cached_tokens}"
            )
        if self.ttft_s is not None:
            parts.append(f"ttft={self.ttft_s:.3f}s")
        if self.user is not None:
            parts.append(f"user={json.dumps(self.user[:128])}")
        return " ".join(parts)


EXCHANGE: web.RequestKey[Exchange] = web.RequestKey("exchange", Exchange)


def request_id_of(request: web.BaseRequest) -> str:
    """The client's X-Request-Id if it is printable and short, otherwise a new one."""
    given = request.headers.get("X-Request-Id")
    if given and _SANE_ID.fullmatch(given):
        return given
    return f"{random.getrandbits(_ID_BITS):032x}"

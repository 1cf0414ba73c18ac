"""The order of a gateway's messages about one request. Pure.

A request has headers, perhaps a body, perhaps trailers; its answer may begin once the request has,
as gateways also answer by themselves, and has the same three.
"""

from __future__ import annotations

from typing import Literal

from commutator.errors import CommutatorError

Phase = Literal["request_headers", "request", "request_ended", "response", "response_ended"]

_NEXT: dict[tuple[Phase, str], Phase] = {
    ("request_headers", "request_headers"): "request",
    ("request", "request_body"): "request",
    ("request", "request_trailers"): "request_ended",
    ("request", "response_headers"): "response",
    ("request_ended", "response_headers"): "response",
    ("response", "response_body"): "response",
    ("response", "response_trailers"): "response_ended",
    # What still comes of a request that the gateway has answered by itself.
    ("response", "request_body"): "response",
    ("response", "request_trailers"): "response",
    ("response_ended", "request_body"): "response_ended",
    ("response_ended", "request_trailers"): "response_ended",
}
"""Where a message leads that does not end its side by itself."""
_ENDS: dict[tuple[Phase, str], Phase] = {
    ("request_headers", "request_headers"): "request_ended",
    ("request", "request_body"): "request_ended",
    ("request", "response_headers"): "response_ended",
    ("request_ended", "response_headers"): "response_ended",
    ("response", "response_body"): "response_ended",
}
"""The same for one that does."""


class GatewayError(CommutatorError):
    """A gateway said what none may say."""


class Order:
    """Where one request is."""

    def __init__(self) -> None:
        self.phase: Phase = "request_headers"
        self._request_ended = False

    def take(self, kind: str | None, *, ends: bool = False) -> None:
        """The next message; ``ends``: it says that nothing of its side follows.

        Raises GatewayError for one that cannot come now, such as None: a message about nothing.
        """
        step = self.phase, kind or "none"
        after = _ENDS.get(step) if ends else None
        after = after or _NEXT.get(step)
        ours = step[1].startswith("request_")
        if after is None or (ours and self._request_ended):
            raise GatewayError(f"{step[1]} cannot come in the phase {self.phase}")
        self._request_ended |= ours and (ends or kind == "request_trailers")
        self.phase = after

    @property
    def request_over(self) -> bool:
        """The client's request is whole, or answered without it."""
        return self.phase not in {"request_headers", "request"}

    @property
    def answered(self) -> bool:
        """The answer is whole."""
        return self.phase == "response_ended"

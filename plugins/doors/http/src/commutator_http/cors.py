"""Lets the pages of other sites call: CORS."""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler

from commutator.frontend import RATE_LIMIT_HEADERS

_SHOWN = (
    "X-Request-Id",
    "X-Commutator-Worker",
    "X-Commutator-Decision",
    "X-Commutator-Ignored",
    "Retry-After",
)
_EXPOSED = ", ".join(_SHOWN + RATE_LIMIT_HEADERS)
_METHODS = "GET, POST, DELETE, OPTIONS"
_PREFLIGHT_AGE_S = 600


class Cors:
    """``origins`` are complete, such as https://chat.example; ``*`` allows every one."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    @web.middleware
    async def preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer the preflight request of a browser; it carries no key."""
        asked = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not (asked and self._allowed(request)):
            return await handler(request)
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": _METHODS,
                "Access-Control-Allow-Headers": request.headers.get(
                    "Access-Control-Request-Headers", "*"
                ),
                "Access-Control-Max-Age": str(_PREFLIGHT_AGE_S),
            },
        )

    def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the browser show this response to the page."""
        response.headers["Vary"] = "Origin"
        if origin := self._allowed(request):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _allowed(self, request: web.Request) -> str | None:
        origin = request.headers.get("Origin")
        if origin is None:
            return None
        if "*" in self._origins:
            return "*"
        return origin if self.allows(origin) else None

    def allows(self, origin: str) -> bool:
        """Whether pages of ``origin`` may call."""
        return "*" in self._origins or origin in self._origins

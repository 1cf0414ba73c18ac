"""The page at /ui: a live view of the run, and a chat to try its models.

These are files without any data of the deployment, so everyone may read them; the page asks
/admin/live and the API for data, with the key that its user types. Nothing is loaded from
elsewhere, and no script but ours runs: what workers, models and clients call themselves is text.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path

from aiohttp import web

from commutator.contract.operations import OperationsRoute

__all__ = ["PAGE_PATHS", "page_routes", "write_player"]

_TYPES = {
    "style.css": "text/css",
    "app.js": "text/javascript",
    "view.js": "text/javascript",
    "chat.js": "text/javascript",
    "charts.js": "text/javascript",
    "decision.js": "text/javascript",
    "timeline.js": "text/javascript",
    "recording.js": "text/javascript",
    "markdown.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
"""The files beside index.html."""

PAGE_PATHS = frozenset({"/", "/ui", *(f"/ui/{name}" for name in _TYPES)})
"""Of the page and its files."""

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}


def write_player(to: Path, recording: str) -> None:
    """Write the page to the folder ``to``, as one that plays the recording at that address."""
    folder = files(__name__)
    (to / "ui").mkdir(parents=True, exist_ok=True)
    for name in _TYPES:
        (to / "ui" / name).write_bytes((folder / name).read_bytes())
    page = (folder / "index.html").read_text()
    played = f'data-chat="no" data-recording="{escape(recording)}"'
    (to / "index.html").write_text(page.replace('data-chat="yes"', played))


def page_routes(*, chat: bool, needs_key: bool) -> Iterable[OperationsRoute]:
    """The page and its files; ``chat``: whether the API is served at the same address."""
    folder = files(__name__)
    page = (folder / "index.html").read_bytes()
    if not chat:
        page = page.replace(b'data-chat="yes"', b'data-chat="no"')
    if needs_key:
        page = page.replace(b'data-key="no"', b'data-key="yes"')

    async def root(request: web.Request) -> web.Response:
        """Browsers are sent to the page; others ask whether anybody is there."""
        if "text/html" not in request.headers.get("Accept", ""):
            return web.Response(text="Commutator; a page for browsers is at /ui\n")
        # Relative, so that it also holds behind a proxy that serves this below another path.
        return web.Response(status=302, headers={"Location": "ui"})

    async def file(request: web.Request) -> web.Response:
        body, kind = contents[request.path.rpartition("/")[2]]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

    contents = {name: ((folder / name).read_bytes(), kind) for name, kind in _TYPES.items()}
    contents["ui"] = page, "text/html"
    return [
        OperationsRoute(
            method="GET", path=path, needs="nothing", handle=root if path == "/" else file
        )
        for path in sorted(PAGE_PATHS)
    ]

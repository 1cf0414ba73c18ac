"""The other front doors of a deployment, which listen on the same port."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from commutator.frontend.metrics_pages import merged_pages

__all__ = ["OWN", "Siblings"]

OWN = "own"
"""In the query of `/metrics`: without the others'."""

_ANSWER_S = 2.0


class Siblings:
    """Reaches each of them on its Unix socket, which lies beside ``socket``, our own."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def metrics(self, own: str) -> str:
        """The metrics of all, ours being ``own``; of one that does not answer there are none."""
        paths = sorted(self._socket.parent.glob(f"*{self._socket.suffix}"))
        pages = await asyncio.gather(*(self._page(path, own) for path in paths))
        found = zip((path.stem for path in paths), pages, strict=True)
        return merged_pages({name: page for name, page in found if page is not None})

    async def _page(self, path: Path, own: str) -> str | None:
        if path == self._socket:
            return own
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        connector = aiohttp.UnixConnector(str(path))
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get(f"http://localhost/metrics?{OWN}=1") as answer,
            ):
                return await answer.text() if answer.ok else None
        except (aiohttp.ClientError, OSError):  # TimeoutError is one, too
            return None

"""What browsers call an origin, as they write it in the header ``Origin``."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

__all__ = ["origin_problem"]

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://((?:[a-z0-9_.-]+|\[[0-9a-f:.]+\]))(?::([0-9]+))?")
_USUAL_PORTS = {"http": "80", "https": "443"}


def origin_problem(text: str) -> str | None:
    """Why no browser's ``Origin`` is ever equal to ``text``, and what is; None for a good one."""
    if text in {"*", "null"}:
        return None
    match = _ORIGIN.fullmatch(text)
    if match is not None and match[3] != _USUAL_PORTS.get(match[1], ""):
        return None
    told = f'"{text}" is no origin, so no page would ever match'
    better = _nearest(text)
    return f"{told}: write {better}" if better else f'{told}: write it as "https://chat.example"'


def _nearest(text: str) -> str | None:
    """The origin that was probably meant, in quotes."""
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        host, port = parts.hostname or "", parts.port
        host = f"[{host}]" if ":" in host else host.encode("idna").decode()
    except (ValueError, UnicodeError):
        return None
    scheme = parts.scheme.lower()
    usual = port is None or str(port) == _USUAL_PORTS.get(scheme)
    origin = f"{scheme}://{host}" + ("" if usual else f":{port}")
    return f'"{origin}"' if _ORIGIN.fullmatch(origin) else None

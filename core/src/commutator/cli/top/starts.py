"""Workers that are not in the registry, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["start_text"]


def start_text(one: Mapping[str, Any], now_unix_s: float) -> str:
    """What is known of a worker that is not in the registry, for people."""
    since_s = max(0.0, now_unix_s - one["since_unix_s"])
    text = f"for {since_s:.0f} s"
    if one["cause"] is not None:
        text += f": {one['cause']}"
    if one["next_start_unix_s"] is not None:
        text += f"; starts again in {max(0.0, one['next_start_unix_s'] - now_unix_s):.0f} s"
    return text

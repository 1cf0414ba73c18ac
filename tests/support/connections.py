"""Connections of front doors to what runs beside the supervisor, without a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Sent"]


class Sent:
    """A connection: what a service sends on it is passed to ``take``."""

    unsent_bytes = 0

    def __init__(self, take: Callable[[list[Any]], object]) -> None:
        self._take = take
        self.closed = False

    def send(self, frame: list[Any]) -> None:
        self._take(frame)

    def close(self) -> None:
        self.closed = True

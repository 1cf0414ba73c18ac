"""Server-sent events out of the bytes of a connection, wherever it cuts them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["DONE", "ServerEvents"]

DONE = b"[DONE]"
"""The data of the last event of a stream in OpenAI's manner."""
_FIELD = b"data:"


class ServerEvents:
    """Feed it what arrives; the data of each event comes out as soon as it is whole.

    Of the fields only ``data`` is read, and an event has one: so the engines send them. Comments,
    which keep a connection alive, are left out.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if event.startswith(_FIELD):
                yield event[len(_FIELD) :].strip()

"""Messages in pieces that NATS carries: live, and in pages of a replay. Pure.

NATS refuses payloads above ``max_payload``, by default 1 MB. A live message is one frame or
several; a reader that lost one of them asks for the message again. A replay is asked for page by
page, so that a reader gets no more than it takes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from commutator.contract.event_bus import KeptMessages, Message

_RECORD_BYTES = 40
"""What a piece costs in a page beside its bytes, at most."""
_MOST_PIECES = 1000
"""Of a page."""


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """A part of a live message; or, with ``parts`` 0, that ``sequence`` is the next number."""

    instance: str
    sequence: int
    part: int
    parts: int
    piece: bytes


class Request(msgspec.Struct, array_like=True, frozen=True):
    """Asks for a page: messages from ``first`` on, the first one from byte ``offset`` on."""

    instance: str
    first: int
    offset: int
    nonce: bytes


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """A message in a page, or a part of one."""

    sequence: int
    offset: int
    total: int
    """Bytes of the whole message."""
    data: bytes


class Page(msgspec.Struct, array_like=True, frozen=True):
    """An answer to a request."""

    pieces: tuple[Piece, ...]
    complete: bool
    """Whether the last message that there is ends with it."""


def split(instance: str, sequence: int, body: bytes, most_bytes: int) -> Iterator[Frame]:
    """The frames of a message, with at most ``most_bytes`` of it each."""
    parts = max(1, -(-len(body) // most_bytes))
    for part in range(parts):
        piece = body[part * most_bytes : (part + 1) * most_bytes]
        yield Frame(instance, sequence, part, parts, piece)


def head(instance: str, end: int) -> Frame:
    """Says that message ``end - 1`` was the last: who has not got it has missed some."""
    return Frame(instance, end, 0, 0, b"")


class Incoming:
    """What one reader makes of one stream's frames."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self.last = -1
        """The number of the last whole message."""
        self._parts: list[bytes] = []
        self._of = -1

    def feed(self, frame: Frame) -> Message | None:
        """The message that ``frame`` completes. Copies, and other instances' frames, are none."""
        if frame.instance != self._instance or frame.sequence <= self.last or not frame.parts:
            return None
        if frame.part == 0:
            self._of, self._parts = frame.sequence, []
        if frame.sequence != self._of or frame.part != len(self._parts):
            self._of = -1  # a part is missing: the whole is asked for again
            return None
        self._parts.append(frame.piece)
        if len(self._parts) < frame.parts:
            return None
        body, self._parts = b"".join(self._parts), []
        self._of, self.last = -1, frame.sequence
        return frame.sequence, body

    def is_behind(self, frame: Frame) -> bool:
        """Whether ``frame`` is a head, and tells of messages that have not come."""
        ours = frame.instance == self._instance and frame.parts == 0
        return ours and frame.sequence - 1 > self.last


def page(kept: KeptMessages, first: int, offset: int, most_bytes: int) -> Page:
    """What is kept from ``first`` and its byte ``offset`` on, as much as fits."""
    pieces: list[Piece] = []
    room = most_bytes
    for sequence, body in kept.since(first):
        if pieces and (room <= _RECORD_BYTES or len(pieces) >= _MOST_PIECES):
            return Page(tuple(pieces), complete=False)
        start = offset if sequence == first else 0
        data = body[start : start + max(1, room - _RECORD_BYTES)]
        pieces.append(Piece(sequence, start, len(body), data))
        room -= _RECORD_BYTES + len(data)
        if start + len(data) < len(body):
            return Page(tuple(pieces), complete=False)
    return Page(tuple(pieces), complete=True)


class Reassembly:
    """The messages of a replay, out of its pages."""

    def __init__(self, first: int) -> None:
        self.first = first
        """The message to ask for next, ..."""
        self.offset = 0
        """... from this byte on."""
        self._parts: list[bytes] = []

    def feed(self, answer: Page) -> list[Message]:
        """The messages that the next page completes. Raises ValueError for a page of no replay."""
        messages: list[Message] = []
        for piece in answer.pieces:
            if piece.sequence > self.first and piece.offset == 0:
                self._begin(piece.sequence)  # what is before is no longer kept
            if (piece.sequence, piece.offset) != (self.first, self.offset):
                raise ValueError("the answer to a replay request skips bytes")
            self._parts.append(piece.data)
            self.offset += len(piece.data)
            if self.offset >= piece.total:
                messages.append((self.first, b"".join(self._parts)))
                self._begin(self.first + 1)
            elif not piece.data:
                raise ValueError("the answer to a replay request holds nothing")
        if not answer.pieces and not answer.complete:
            raise ValueError("the answer to a replay request is empty")
        return messages

    def _begin(self, sequence: int) -> None:
        self.first, self.offset, self._parts = sequence, 0, []

"""What chat and completions answers differ in: how pieces become chunks, and chunks an answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from commutator.frontend.choice import Piece
from commutator.frontend.responses import Finish, Usage

__all__ = ["MIN_LOGPROB", "Shape", "encode", "event"]

encode = msgspec.json.Encoder().encode

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


class Shape(ABC):
    """The texts around one request's pieces, most of it written once."""

    chunk_name: str
    id_prefix: str

    def __init__(self, request_id: str, model: str, *, include_usage: bool) -> None:
        self.id = self.id_prefix + request_id
        self.model = model
        self.created = int(time.time())
        self.include_usage = include_usage
        common = encode(
            {"id": self.id, "object": self.chunk_name, "created": self.created, "model": model}
        )
        self._head = b"data: " + common[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    @abstractmethod
    def first(self, number: int) -> bytes:
        """The chunk that stands before an answer's first piece, or nothing."""

    @abstractmethod
    def content(self, number: int, piece: Piece) -> bytes:
        """The chunk of one piece that has text or log probabilities."""

    @abstractmethod
    def finish(self, number: int, reason: Finish) -> bytes:
        """An answer's last chunk."""

    @abstractmethod
    def answer(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> Any:
        """The whole response object, from all pieces of all choices."""

    def usage(self, usage: Usage) -> bytes:
        """The chunk that ends the stream, if ``include_usage`` says that the client wants it."""
        return self._head + b'],"usage":' + encode(usage) + b"}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        """A chunk around the JSON of one choice."""
        return self._head + choice + self._tail

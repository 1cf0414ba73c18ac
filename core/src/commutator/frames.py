"""Frames over TCP: a 4-byte big-endian length, then one MessagePack array that is not empty."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgspec

from commutator.errors import CommutatorError
from commutator.trust import Gate, Handshake, HandshakeError, Identity

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")
_KIND_CHARS = 40
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def pack(frame: list[Any] | tuple[Any, ...]) -> bytes:
    """One frame, ready to write."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def kind_of(frame: list[Any]) -> str:
    """The first element of a frame for the log, which may be anything of any length."""
    kind = frame[0]
    return repr(kind[:_KIND_CHARS]) if isinstance(kind, str) else type(kind).__name__


class Versions(NamedTuple):
    """The versions of some messages that one end speaks: all from the oldest to the newest."""

    oldest: int
    newest: int

    def common(self, other: Versions) -> int | None:
        """The highest version that both speak; None: there is none."""
        highest = min(self.newest, other.newest)
        return highest if highest >= max(self.oldest, other.oldest) else None

    def __str__(self) -> str:
        alone = self.oldest == self.newest
        return f"version {self.newest}" if alone else f"versions {self.oldest} to {self.newest}"


def versions_in(value: Any) -> Versions:
    """Those that the other end names. Raises ValueError for anything else."""
    match value:
        case [int(oldest), int(newest)] if 0 < oldest <= newest:
            return Versions(oldest, newest)
    raise ValueError(f"no versions: {value!r:.40}")


class FrameProtocol(asyncio.Protocol):
    """Cuts the byte stream of one connection into frames.

    ``on_frame`` gets each decoded array; ``on_lost`` is called once when the connection ends, with
    the reason. A frame that is too long or not MessagePack ends the connection. With a ``gate``,
    both ends first prove that they belong to the same run: nothing is parsed or sent before.
    """

    def __init__(
        self,
        on_frame: Callable[[list[Any]], None],
        on_lost: Callable[[str], None],
        gate: Gate | None = None,
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._gate = gate
        self._handshake: Handshake | None = None
        """The handshake that is not complete yet."""
        self._deadline: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        self._problem: str | None = None
        self.transport: asyncio.Transport | None = None
        """None before the connection begins, and after it ended."""
        self.identity: Identity | None = None
        """Who the peer is, by its certificate; None on one machine, where there is no TLS."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not subclass asyncio's, so isinstance cannot be used.
        self.transport = cast(asyncio.Transport, transport)
        if self._gate is None:
            return
        try:
            self.identity = self._gate.identify(self.transport)
            self._handshake = self._gate.enter(self.transport)
        except CommutatorError as error:  # a stranger; or this process has no secret to prove
            self.abort(str(error))
            return
        if self._handshake is not None:
            limit_s = self._gate.deadline_s
            self._deadline = asyncio.get_running_loop().call_later(
                limit_s, self._refuse, f"it proved nothing within {limit_s:g} s"
            )
            if first := self._handshake.begin():
                self.transport.write(first)

    async def proven(self) -> None:
        """Wait until the peer has proved that it belongs to this run. Raises ConnectionError."""
        if self._handshake is not None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        elif self._problem is not None:
            raise ConnectionError(self._problem)

    def send(self, frame: list[Any] | tuple[Any, ...]) -> None:
        """Write one frame, together with what else is sent in this turn of the event loop.

        Dropped silently when the connection has ended.
        """
        if self.transport is not None and not self.transport.is_closing():
            if not self._unsent and self._handshake is None:
                asyncio.get_running_loop().call_soon(self._flush)
            self._unsent.append(pack(frame))

    def _flush(self) -> None:
        if self._handshake is not None:
            return  # kept until the peer has proved itself
        unsent, self._unsent = self._unsent, []
        if unsent and self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"".join(unsent))

    @property
    def unsent_bytes(self) -> int:
        """Bytes passed to ``send`` that the system has not accepted yet."""
        taken = 0 if self.transport is None else self.transport.get_write_buffer_size()
        return taken + sum(map(len, self._unsent))

    def close(self) -> None:
        """Close the connection after writing what was sent, if the peer has proved itself."""
        self._flush()
        self._end_handshake(None)
        if self.transport is not None:
            self.transport.close()

    def abort(self, problem: str) -> None:
        """End the connection at once, whatever is unsent; ``on_lost`` gets the problem."""
        self._problem = problem
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._problem is not None:
            return
        if self._handshake is not None:
            data = self._take_proof(self._handshake, data)
            if not data:
                return
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                self.abort(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
                return
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            try:
                frame = _decoder.decode(memoryview(buffer)[start + _LENGTH.size : end])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.abort(f"not a frame: {error}")
                return
            start = end
            if not isinstance(frame, list) or not frame:
                self.abort("not a frame: expected a non-empty array")
                return
            self._on_frame(frame)
        del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        reason = self._problem or (str(exc) if exc else "connection closed")
        if self._handshake is not None:
            reason = self._problem or "it closed the connection before both ends proved themselves"
            self._end_handshake(reason)
        # Frees the 256 KiB of a TLS connection now, not when cycles are collected next.
        self.transport = None
        self._on_lost(reason)

    def _take_proof(self, handshake: Handshake, data: bytes) -> bytes:
        """Continue the handshake. Returns the bytes that follow it."""
        assert self.transport is not None
        try:
            answer, rest = handshake.feed(data)
        except HandshakeError as error:
            self._refuse(str(error))
            return b""
        if answer:
            self.transport.write(answer)
        if handshake.proven:
            self._end_handshake(None)
            self._flush()
        return rest

    def _refuse(self, reason: str) -> None:
        self._end_handshake(reason)
        self.abort(reason)

    def _end_handshake(self, problem: str | None) -> None:
        """Idempotent: a handshake ends once, with the problem that came first."""
        handshake, self._handshake = self._handshake, None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if handshake is None or self._gate is None or self.transport is None:
            return
        if not handshake.proven:
            self._problem = problem or "connection closed"
        self._gate.leave(self.transport, problem)
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            if handshake.proven:
                waiting.set_result(None)
            else:
                waiting.set_exception(ConnectionError(problem or "connection closed"))


class Questions:
    """What was asked on a connection, by number, until it is answered. Used from one event loop."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        """Of the next ones."""
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, send: Callable[[int], None], timeout_s: float) -> Any:
        """The answer to what ``send`` asks by a number. Raises TimeoutError, or its failure."""
        number = next(self.numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            send(number)
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._open.pop(number, None)

    def answer(self, number: int, value: Any) -> None:
        """Hand the answer to its waiter, if there still is one; an exception is raised there."""
        question = self._open.get(number)
        if question is None or question.done():
            return
        if isinstance(value, Exception):
            question.set_exception(value)
        else:
            question.set_result(value)

    def fail(self, error: Exception) -> None:
        """None of them will be answered."""
        for number in self._open:
            self.answer(number, error)

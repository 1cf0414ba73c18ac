"""The token API's frames: a 4-byte big-endian length, then one MessagePack array.

    client -> server                                server -> client
    ["hello", protocol]                             ["info", EngineInfo]
    ["generate", key, request]                      ["deltas", [[key, ids, extras | nil], ...]]
    ["abort", key]                                  ["refused", key, reason, kind]
    ["ask", number, what, argument...]              ["answer", number, value]
                                                    ["failed", number, reason]

``key`` numbers the requests of one connection. ``request`` is a GenerateRequest in MessagePack of
its own, as bytes: so it is decoded only once, into its class. A "deltas" frame holds everything
that one engine tick produced for this connection; ``extras`` is a map that leaves out what is not
set. ``what`` is "load", "drain", "resume" or "reset_prefix_cache", without arguments; or "kv" with
a question about storage tiers (see ``kv.admin``) or "handover" with one about blocks that are
handed over (see ``handover.pull_words``), each with a map of its arguments. Only the last two may
fail.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec

from commutator.types import FinishReason, GenerateRequest, TokenDelta, TokenLogprob

__all__ = [
    "PROTOCOL",
    "FrameProtocol",
    "pack",
    "pack_delta",
    "pack_request",
    "unpack_delta",
    "unpack_request",
]

PROTOCOL = 2
MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")
_FINISH_REASONS = {reason.value: reason for reason in FinishReason}
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()
_request_decoder = msgspec.msgpack.Decoder(GenerateRequest)


def pack(frame: list[Any] | tuple[Any, ...]) -> bytes:
    """One frame, ready to write."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def pack_request(request: GenerateRequest) -> bytes:
    """The last part of a "generate" frame."""
    return _encoder.encode(request)


def unpack_request(packed: bytes) -> GenerateRequest:
    """The inverse of ``pack_request``. Raises ValueError for anything else."""
    return _request_decoder.decode(packed)


def pack_delta(key: int, delta: TokenDelta) -> list[Any]:
    """A delta as the compact array of a "deltas" frame."""
    extras: dict[str, Any] = {}
    if delta.logprobs:
        extras["logprobs"] = [(lp.token_id, lp.logprob, lp.top) for lp in delta.logprobs]
    if delta.finish_reason is not None:
        extras["finish"] = delta.finish_reason.value
    if delta.stop_reason is not None:
        extras["stop"] = delta.stop_reason
    if delta.cached_tokens is not None:
        extras["cached"] = delta.cached_tokens
    if delta.error is not None:
        extras["error"] = delta.error
    if delta.handover is not None:
        extras["handover"] = delta.handover
    if delta.handover_failed:
        extras["handover_failed"] = True
    return [key, delta.token_ids, extras or None]


def unpack_delta(token_ids: list[int], extras: dict[str, Any] | None) -> TokenDelta:
    """The inverse of ``pack_delta``, less the key."""
    if extras is None:
        return TokenDelta(tuple(token_ids))
    finish = extras.get("finish")
    logprobs = extras.get("logprobs", ())
    return TokenDelta(
        token_ids=tuple(token_ids),
        logprobs=tuple(
            TokenLogprob(token, logprob, tuple((i, p) for i, p in top))
            for token, logprob, top in logprobs
        )
        if logprobs
        else (),
        finish_reason=_FINISH_REASONS[finish] if finish is not None else None,
        stop_reason=extras.get("stop"),
        cached_tokens=extras.get("cached"),
        error=extras.get("error"),
        handover=extras.get("handover"),
        handover_failed=extras.get("handover_failed", False),
    )


class FrameProtocol(asyncio.Protocol):
    """Cuts the byte stream of one connection into frames.

    ``on_frame`` gets each decoded array; ``on_lost`` is called once when the connection ends, with
    the reason. A frame that is too long or not MessagePack ends the connection.
    """

    def __init__(
        self, on_frame: Callable[[list[Any]], None], on_lost: Callable[[str], None]
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        self._problem: str | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not subclass asyncio's, so there is no isinstance to ask.
        self.transport = cast(asyncio.Transport, transport)

    def send(self, frame: list[Any] | tuple[Any, ...]) -> None:
        """Write one frame, together with what else is sent in this turn of the event loop.

        Dropped silently when the connection is already gone.
        """
        if self.transport is not None and not self.transport.is_closing():
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._flush)
            self._unsent.append(pack(frame))

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"".join(unsent))

    @property
    def unsent_bytes(self) -> int:
        """What was sent and the system has not taken yet."""
        taken = 0 if self.transport is None else self.transport.get_write_buffer_size()
        return taken + sum(map(len, self._unsent))

    def close(self) -> None:
        """End the connection after what was sent."""
        self._flush()
        if self.transport is not None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                self._fail(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
                return
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            try:
                frame = _decoder.decode(memoryview(buffer)[start + _LENGTH.size : end])
            except msgspec.DecodeError as error:
                self._fail(f"not a frame of the token API: {error}")
                return
            start = end
            if not isinstance(frame, list) or not frame:
                self._fail("not a frame of the token API: expected a non-empty array")
                return
            self._on_frame(frame)
        del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self._problem or (str(exc) if exc else "connection closed"))

    def _fail(self, problem: str) -> None:
        self._problem = problem
        assert self.transport is not None
        self.transport.abort()

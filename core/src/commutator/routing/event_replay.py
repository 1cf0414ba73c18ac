"""Receives event messages, many at a time, and asks an engine for those that were missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio

from commutator.errors import EngineUnavailableError

__all__ = ["SEQUENCE_BYTES", "receive_burst", "replay_messages"]

SEQUENCE_BYTES = 8

_END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
_BURST = 32


async def receive_burst(socket: zmq.asyncio.Socket) -> list[list[bytes]]:
    """Wait for a message, and take a few more if they are there already.

    Waiting for each alone would cost more than all that is done with it.
    """
    messages = [await socket.recv_multipart()]
    now: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
    while len(messages) < _BURST:
        try:
            messages.append(now.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
    return messages


async def replay_messages(
    context: zmq.asyncio.Context, endpoint: str, first: int, timeout_s: float
) -> AsyncGenerator[list[tuple[int, bytes]], None]:
    """Every kept message from sequence ``first`` on, as (sequence, body), some at a time.

    Raises EngineUnavailableError when the engine is silent for ``timeout_s`` before the end, or
    answers something else.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.set_hwm(0)  # an answer can be longer than any limit, and what overflows is lost
    try:
        socket.connect(endpoint)
        await socket.send_multipart([b"", first.to_bytes(SEQUENCE_BYTES, "big")])
        while True:
            try:
                burst = await asyncio.wait_for(receive_burst(socket), timeout_s)
            except TimeoutError:
                raise EngineUnavailableError(
                    f"no answer from the event replay endpoint {endpoint} for {timeout_s:g} s"
                ) from None
            messages = [_read_answer(frames, endpoint) for frames in burst]
            complete = None in messages
            yield [message for message in messages if message is not None]
            if complete:
                return
    finally:
        socket.close()


def _read_answer(frames: list[bytes], endpoint: str) -> tuple[int, bytes] | None:
    """Empty frame, topic, sequence, body; older engines leave out the topic. None at the end."""
    if len(frames) not in (3, 4) or len(frames[-2]) != SEQUENCE_BYTES:
        raise EngineUnavailableError(f"{endpoint} answers no event replay requests")
    if frames[-2] == _END:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]

"""Asks an engine for event messages that were missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio

from commutator.errors import EngineUnavailableError

__all__ = ["END_OF_REPLAY", "replay_messages"]

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_SEQUENCE_BYTES = 8


async def replay_messages(
    context: zmq.asyncio.Context, endpoint: str, first: int, timeout_s: float
) -> AsyncGenerator[tuple[int, bytes], None]:
    """Every kept message from sequence ``first`` on, as (sequence, body).

    Raises EngineUnavailableError when the engine is silent for ``timeout_s`` before the end, or
    answers something else.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.set_hwm(0)  # an answer can be longer than any limit, and what overflows is lost
    try:
        socket.connect(endpoint)
        await socket.send_multipart([b"", first.to_bytes(_SEQUENCE_BYTES, "big")])
        while True:
            try:
                frames = await asyncio.wait_for(socket.recv_multipart(), timeout_s)
            except TimeoutError:
                raise EngineUnavailableError(
                    f"no answer from the event replay endpoint {endpoint} for {timeout_s:g} s"
                ) from None
            # Empty frame, topic, sequence, body; older engines leave out the topic.
            if len(frames) not in (3, 4) or len(frames[-2]) != _SEQUENCE_BYTES:
                raise EngineUnavailableError(f"{endpoint} answers no event replay requests")
            if frames[-2] == END_OF_REPLAY:
                return
            yield int.from_bytes(frames[-2], "big"), frames[-1]
    finally:
        socket.close()

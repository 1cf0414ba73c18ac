"""Receives event messages, many at a time, and asks an engine for those that were missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import zmq

from commutator.errors import EngineUnavailableError

__all__ = ["SEQUENCE_BYTES", "receive_burst", "replay_messages"]

SEQUENCE_BYTES = 8

_END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
_BURST = 32


async def receive_burst(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Wait for a message, and take a few more if they are there already.

    ``socket`` is none of ``zmq.asyncio``, whose way to one message costs as much as all that is
    done with it. One task reads it at a time.
    """
    messages: list[list[bytes]] = []
    while not messages:
        while len(messages) < _BURST and int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        if not messages:
            await _something_happens(socket)
    return messages


async def _something_happens(socket: zmq.Socket[bytes]) -> None:
    """Wait until ``zmq.EVENTS`` may have changed since it was read."""
    loop = asyncio.get_running_loop()
    happened = asyncio.Event()
    descriptor = int(socket.getsockopt(zmq.FD))
    loop.add_reader(descriptor, happened.set)
    try:
        await happened.wait()
    finally:
        loop.remove_reader(descriptor)


async def replay_messages(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, first: int, timeout_s: float
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
        socket.send_multipart([b"", first.to_bytes(SEQUENCE_BYTES, "big")], zmq.NOBLOCK)
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

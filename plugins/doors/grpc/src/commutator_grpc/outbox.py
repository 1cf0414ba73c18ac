"""Answers on their way to clients: no faster than these read, within bytes and seconds.

A message is under way until HTTP/2's flow control has let all of it out. gRPC's library can neither
take it back nor end its call before that, so a client that reads nothing loses its connection, once
others need the room.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc.aio

log = logging.getLogger(__name__)

_QUEUED_BYTES = 64 << 10
"""Of a call's messages; who has more to send waits."""


class Unread:
    """What all clients of a door have still to read, in bytes and calls.

    Where there is more than is allowed, connections are closed, the one first whose message has
    been under way for longest.
    """

    def __init__(
        self,
        most_bytes: int,
        most_stuck: int,
        timeout_s: float,
        on_drop: Callable[[], None] = lambda: None,
    ) -> None:
        """``timeout_s``: the longest time that a call waits for its client to read a message.

        ``most_stuck``: calls that have given up, and end once the client reads or leaves.
        """
        self.held_bytes = 0
        self.stuck = 0
        self.timeout_s = timeout_s
        self._sending: dict[Outbox, None] = {}
        """Those with a message under way, the oldest first."""
        self._most_bytes = most_bytes
        self._most_stuck = most_stuck
        self._on_drop = on_drop

    def begun(self, outbox: Outbox) -> None:
        """A message of ``outbox`` is under way."""
        self._sending[outbox] = None

    def ended(self, outbox: Outbox) -> None:
        """It is no more."""
        self._sending.pop(outbox, None)

    def add(self, size: int, stuck: int = 0) -> None:
        """Count ``size`` bytes and ``stuck`` calls more, or less."""
        self.held_bytes += size
        self.stuck += stuck
        while self._sending and (
            self.held_bytes > self._most_bytes or self.stuck > self._most_stuck
        ):
            self._drop(next(iter(self._sending)).peer)

    def _drop(self, peer: str) -> None:
        """Close the connection to ``peer``; all its calls end."""
        for outbox in [one for one in self._sending if one.peer == peer]:
            del self._sending[outbox]
            outbox.give_up()
        if shut(peer):
            log.warning("%s does not read its answers; its connection is closed", peer)
        self._on_drop()


class Outbox:
    """The messages of one call, in their order."""

    def __init__(
        self, unread: Unread, context: Any, on_over: Callable[[], None] = lambda: None
    ) -> None:
        """``on_over`` is called when nothing can be sent any more."""
        self.peer: str = context.peer()
        self.is_over = False
        self._unread = unread
        self._context = context
        self._on_over = on_over
        self._held_bytes = 0
        self._is_stuck = False
        self._queue: deque[bytes] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._turns: deque[asyncio.Future[None]] = deque()
        """Of those that wait for room in the queue."""
        self._sent = asyncio.Event()
        self._sent.set()

    async def write(self, data: bytes) -> None:
        """Have ``data`` sent, once there is room for it among what is still to be sent.

        Raises ConnectionError where the client has left, or reads nothing.
        """
        while self._held_bytes > _QUEUED_BYTES and not self.is_over:
            await self._turn()
        if self.is_over:
            raise ConnectionError("the client has left, or does not read its answer")
        self._queue.append(data)
        self._hold(len(data))
        if self._sending is None:
            self._sent.clear()
            self._sending = asyncio.create_task(self._send_all())
        self._let_in()

    def leave(self, data: bytes) -> None:
        """Count ``data``, which gRPC's library sends as the only message, until the call ends."""
        self._hold(len(data))
        self._unread.begun(self)
        loop = asyncio.get_running_loop()
        limit = loop.call_later(self._unread.timeout_s, self._expire, len(data))

        def over(_: Any) -> None:
            limit.cancel()
            self._unread.ended(self)
            self._hold(-self._held_bytes)
            self._unstick()

        self._context.add_done_callback(over)

    async def flush(self) -> None:
        """Wait until all is sent. Raises ConnectionError where it cannot be."""
        await self._sent.wait()
        if self.is_over:
            raise ConnectionError("the client has left, or does not read its answer")

    async def settle(self) -> None:
        """Wait until nothing is under way: before that no status can end the call."""
        if self._sending is not None:
            await asyncio.wait({self._sending})

    def give_up(self) -> None:
        """Send nothing more: others need the room."""
        self._end()
        self._hold(-self._held_bytes)
        self._unstick()

    async def _send_all(self) -> None:
        unread, loop = self._unread, asyncio.get_running_loop()
        try:
            while self._queue:
                data = self._queue.popleft()
                unread.begun(self)
                limit = loop.call_later(unread.timeout_s, self._expire, len(data))
                try:
                    await self._context.write(data)
                finally:
                    limit.cancel()
                    unread.ended(self)
                    self._hold(-min(len(data), self._held_bytes))  # it may have been given up
                self._let_in()
        except (grpc.aio.BaseError, asyncio.CancelledError):  # the client has left
            self._end()
        finally:
            self._unstick()
            self._sending = None
            self._sent.set()

    def _expire(self, under_way: int) -> None:
        """Nobody waits for the message any more, but it keeps its room."""
        if self.is_over:
            return
        self._end()
        self._hold(min(under_way, self._held_bytes) - self._held_bytes)
        self._is_stuck = True
        self._unread.add(0, 1)

    def _unstick(self) -> None:
        if self._is_stuck:
            self._is_stuck = False
            self._unread.add(0, -1)

    def _end(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._queue.clear()
        self._sent.set()
        self._let_in()
        self._on_over()

    def _hold(self, size: int) -> None:
        self._held_bytes += size
        self._unread.add(size)

    async def _turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._let_in()
            raise

    def _let_in(self) -> None:
        """Wake the first that waits, if there is room, or all of them where nothing can be sent."""
        while self._turns and (self.is_over or self._held_bytes <= _QUEUED_BYTES):
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                if not self.is_over:
                    return


def shut(peer: str) -> bool:
    """Shut the TCP connection of this process to ``peer``, which is as gRPC says it.

    Its library, which owns the connection, sees it end. Returns whether there was one.
    """
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in {"ipv4", "ipv6"} or not port.isdigit():
        return False
    wanted = (host.strip("[]"), int(port))
    for name in Path("/dev/fd").iterdir():
        with suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.fstat(int(name.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name.name))) as found:
                # What a socket of both families says of an address of the older one.
                address = found.getpeername()
                if isinstance(address, tuple) and _plain(address) == wanted:
                    found.shutdown(socket.SHUT_RDWR)
                    return True
    return False


def _plain(address: tuple[Any, ...]) -> tuple[str, int]:
    host: str = address[0]
    return host.removeprefix("::ffff:"), int(address[1])

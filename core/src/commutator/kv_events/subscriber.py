"""One engine's event stream: a subscription, and replays of missed messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol

import zmq
from attrs import frozen

from commutator.contract.block import EventBatch
from commutator.contract.worker import EventSource
from commutator.errors import EngineUnavailableError
from commutator.kv_events.codec import decode_batch
from commutator.kv_events.sequence import Action, Apply, EventSequence, Position, Replay, Reset

__all__ = [
    "SEQUENCE_BYTES",
    "EventSink",
    "EventSubscriber",
    "SourceTimes",
    "receive_burst",
    "replay_messages",
]

log = logging.getLogger(__name__)

_FRAMES = 3
_HIGH_WATER = 100_000


# A network may drop an idle connection silently. Keep-alive detects that within a minute, and ZMQ
# reconnects.
_KEEP_ALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}


@frozen
class SourceTimes:
    """When to ask an engine for missed events."""

    replay_timeout_s: float = 5.0
    """Give up a replay after this long without a message."""
    settle_s: float = 1.0
    """Ask again this long after connecting: a subscription takes effect with a delay."""
    check_interval_s: float = 30.0
    """Ask at this interval: the last messages before a pause can be lost unnoticed."""


class EventSink(Protocol):
    """Receives a source's events."""

    def apply(self, batch: EventBatch) -> None: ...

    def reset(self, reason: str) -> None: ...

    def undecodable(self, error: Exception) -> None: ...


class EventSubscriber:
    """Reads one event source from ``start`` to ``close``, each message once and in order."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        source: EventSource,
        sink: EventSink,
        times: SourceTimes,
        position: Position | None = None,
    ) -> None:
        self.source = source
        self.sequence = EventSequence(source.replay_endpoint is not None, position=position)
        self._context = context
        self._sink = sink
        self._times = times
        self._tasks: list[asyncio.Task[None]] = []
        self._replaying: asyncio.Task[None] | None = None
        self._settling: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Subscribe. Earlier messages are requested once the connection is up.

        Raises ValueError when the endpoint is not one to connect to.
        """
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(_HIGH_WATER)
        for option, value in _KEEP_ALIVE.items():
            self._socket.setsockopt(option, value)
        self._socket.subscribe(self.source.topic)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._socket.connect(self.source.endpoint)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ValueError(f"{self.source.endpoint}: {error}") from None
        work = (self._read(), self._watch_connection(), self._check_regularly())
        self._tasks = [self._spawn(task) for task in work]

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._replaying] if self._replaying else [])]
        for task in tasks:
            task.cancel()
        if self._settling is not None:
            self._settling.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._tasks:
            self._close_sockets()
            self._tasks = []

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    async def _read(self) -> None:
        while True:
            for frames in await receive_burst(self._socket):
                if len(frames) == _FRAMES and len(frames[1]) == SEQUENCE_BYTES:
                    self._do(self.sequence.on_live(int.from_bytes(frames[1], "big"), frames[2]))
                else:
                    self._sink.undecodable(ValueError(f"a message of {len(frames)} frames"))
            await asyncio.sleep(0)  # many bursts must not block the event loop

    async def _watch_connection(self) -> None:
        while True:
            await receive_burst(self._monitor)  # reports only new connections
            self._do(self.sequence.connected())
            if self._settling is not None:
                self._settling.cancel()
            loop = asyncio.get_running_loop()
            self._settling = loop.call_later(self._times.settle_s, self._check)

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._times.check_interval_s)
            self._check()

    def _check(self) -> None:
        self._do(self.sequence.check())

    async def _replay(self, request: Replay) -> None:
        endpoint = self.source.replay_endpoint
        assert endpoint is not None
        messages = replay_messages(
            self._context, endpoint, request.first, self._times.replay_timeout_s
        )
        try:
            async with contextlib.aclosing(messages):
                async for burst in messages:
                    for sequence, body in burst:
                        self._do(self.sequence.on_replayed(request.number, sequence, body))
                    await asyncio.sleep(0)
        except EngineUnavailableError as error:
            log.warning("%s", error)
            self._do(self.sequence.on_replay_failed(request.number))
        else:
            self._do(self.sequence.on_replay_end(request.number))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(body):
                    self._apply(body)
                case Reset(reason):
                    self._sink.reset(reason)
                case Replay():
                    if self._replaying is not None:
                        self._replaying.cancel()
                    self._replaying = self._spawn(self._replay(action))

    def _apply(self, body: bytes) -> None:
        try:
            self._sink.apply(decode_batch(body))
        except Exception as error:  # noqa: BLE001 - a bad message must not stop the next
            self._sink.undecodable(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("events from %s are no longer read", self.source.endpoint, exc_info=error)


SEQUENCE_BYTES = 8
_END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
_BURST = 32


async def receive_burst(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Wait for a message; return it with a few more if they have arrived already.

    ``socket`` is not one of ``zmq.asyncio``, which takes as long to receive a message as we take to
    process it. Only one task at a time may read a socket.
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
    """Yield every kept message from sequence ``first`` on, in lists of (sequence, body).

    Raises EngineUnavailableError when the engine sends nothing for ``timeout_s`` before the end, or
    when its answer is not a replay.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.set_hwm(0)  # an answer can exceed any limit, and ZMQ would drop the rest
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
        raise EngineUnavailableError(f"{endpoint} does not answer event replay requests")
    if frames[-2] == _END:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]

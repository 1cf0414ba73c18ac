"""The event bus `zmq`: front doors connect to every worker's sockets.

Engines publish on a PUB socket, and answer replays on a ROUTER socket, if they have one. Those that
ask for no proof of who reads are read on their own machine only; for front doors of other hosts the
worker's host publishes what they say on sockets of the same kind that do ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import zmq

from commutator.contract.event_bus import (
    EventBus,
    EventChannel,
    EventOutlet,
    EventStream,
    KeptMessages,
    Message,
)
from commutator.contract.worker import EventSource
from commutator.errors import EngineUnavailableError
from commutator.kv_events.curve import read_with
from commutator.kv_events.publisher import (
    RELAYED_BYTES,
    RELAYED_MESSAGES,
    MessagePublisher,
    end_context,
)
from commutator.trust import network_of_this_process

_FRAMES = 3
_HIGH_WATER = 100_000
_MOST_BYTES = 64 << 20
"""Of one frame; ZMQ leaves a publisher that sends more, and connects again."""
_SCHEMES = ("tcp://", "ipc://", "inproc://")

# A network may drop packets silently, for a while or for ever. TCP alone would try again ever more
# seldom; so a publisher that answers nothing for 3 s is left, and asked anew each second.
_LEAVE_SILENT = {
    zmq.HEARTBEAT_IVL: 1000,
    zmq.HEARTBEAT_TIMEOUT: 3000,
    zmq.CONNECT_TIMEOUT: 1000,
}


class ZmqEventBus(EventBus):
    """One ZMQ context, for all sources of a process."""

    reads_engines = True

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    async def publish(self, stream: EventStream, kept: KeptMessages) -> EventOutlet | None:
        del stream, kept  # readers know its sockets, which keep what they sent
        network = network_of_this_process()
        return None if network is None or not network.spans_hosts else _ZmqOutlet()

    def subscribe(
        self, source: EventSource, on_malformed: Callable[[Exception], None]
    ) -> EventChannel:
        if not source.endpoint.startswith(_SCHEMES) and "://" in source.endpoint:
            raise ValueError(
                f"{source.endpoint} is no ZMQ endpoint: its host publishes on another event bus; "
                "give all hosts the same cluster.events"
            )
        if self._context is None:
            self._context = zmq.Context()
        return _ZmqChannel(self._context, source, on_malformed)

    async def close(self) -> None:
        if self._context is not None:
            end_context(self._context)
            self._context = None


class _ZmqOutlet(EventOutlet):
    """Our publisher's sockets, for what an engine published on its own."""

    def __init__(self) -> None:
        self._publisher = MessagePublisher(keep_messages=RELAYED_MESSAGES, keep_bytes=RELAYED_BYTES)
        self.source = self._publisher.source

    def send(self, sequence: int, body: bytes) -> None:
        del sequence  # the publisher counts likewise, from 0
        self._publisher.send(lambda: body)

    async def close(self) -> None:
        await asyncio.to_thread(self._publisher.close)


class _ZmqChannel(EventChannel):
    """A SUB socket, and a DEALER socket for each replay."""

    numbers_start_again = True

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        source: EventSource,
        on_malformed: Callable[[Exception], None],
    ) -> None:
        self._context = context
        self._source = source
        self._on_malformed = on_malformed
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        self._socket.set_hwm(_HIGH_WATER)
        for option, value in _LEAVE_SILENT.items():
            self._socket.setsockopt(option, value)
        self._socket.subscribe(source.topic)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            _connect(self._socket, source.endpoint, source.server_key)
        except ValueError:
            self._close()
            raise

    async def receive(self) -> Sequence[Message]:
        messages = []
        for frames in await receive_burst(self._socket):
            if len(frames) == _FRAMES and len(frames[1]) == _SEQUENCE_BYTES:
                messages.append((int.from_bytes(frames[1], "big"), frames[2]))
            else:
                self._on_malformed(ValueError(f"a message of {len(frames)} frames"))
        return messages

    async def missed(self) -> None:
        await receive_burst(self._monitor)  # reports only new connections

    def replay(self, first: int, timeout_s: float) -> AsyncGenerator[Sequence[Message], None]:
        assert self._source.replay_endpoint is not None
        return replay_messages(
            self._context,
            self._source.replay_endpoint,
            first,
            timeout_s,
            self._source.server_key,
        )

    async def close(self) -> None:
        self._close()

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
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


def _connect(socket: zmq.Socket[bytes], endpoint: str, server_key: str | None) -> None:
    """Raises ValueError when the endpoint is not one to connect to."""
    read_with(socket, server_key, endpoint)
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"{endpoint}: {error}") from None


async def replay_messages(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    first: int,
    timeout_s: float,
    server_key: str | None = None,
) -> AsyncGenerator[list[Message], None]:
    """Yield every kept message from sequence ``first`` on, in lists of (sequence, body).

    Raises EngineUnavailableError when the engine sends nothing for ``timeout_s`` before the end, or
    when its answer is not a replay.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
    socket.set_hwm(0)  # an answer can exceed any limit, and ZMQ would drop the rest
    try:
        _connect(socket, endpoint, server_key)
        socket.send_multipart([b"", first.to_bytes(_SEQUENCE_BYTES, "big")], zmq.NOBLOCK)
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


def _read_answer(frames: list[bytes], endpoint: str) -> Message | None:
    """Empty frame, topic, sequence, body; older engines leave out the topic. None at the end."""
    if len(frames) not in (3, 4) or len(frames[-2]) != _SEQUENCE_BYTES:
        raise EngineUnavailableError(f"{endpoint} does not answer event replay requests")
    if frames[-2] == _END:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]

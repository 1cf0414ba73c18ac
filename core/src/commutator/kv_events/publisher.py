"""Publishes messages of KV events over ZMQ, and replays missed ones."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import zmq

from commutator.contract.worker import EventSource
from commutator.errors import EngineError
from commutator.kv_events.curve import ReaderGuard, network_to_guard
from commutator.trust import in_url, network_of_this_process, run_folder, secret_of_this_process

log = logging.getLogger(__name__)

_END = -1
_SEQUENCE_BYTES = 8
_POLL_MS = 50
_REPLAYING_POLL_MS = 1
_REPLAY_HIGH_WATER = 100
"""Messages of a replay that ZMQ holds for one reader."""
_MOST_READER_BYTES = 4096
"""Of a frame from a reader: a subscription, or a replay request."""
_MAX_REPLAYS = 64
"""Replays at a time; the one that waits longest for its reader makes room for another."""
_LINGER_MS = 200
"""How long the end of a publisher waits for readers to take its last messages."""
_STALLED_S = 30.0
"""A reader that takes nothing for this long gets no more."""

_numbers = itertools.count()

RELAYED_MESSAGES = 10_000
"""Messages of a stream that its worker's host passes on, and keeps for replays."""
RELAYED_BYTES = 64 * 1024 * 1024
"""The most that they take up."""


class MessageHistory:
    """Keeps at most ``most`` messages, and at most ``most_bytes`` bytes of them. Pure."""

    def __init__(self, most: int, most_bytes: int | None = None) -> None:
        self._bodies: deque[bytes] = deque(maxlen=most)
        self._most_bytes = most_bytes
        self._bytes = 0
        self.end = 0
        """The sequence of the next message."""

    def append(self, body: bytes) -> int:
        """Keep a message; returns its sequence."""
        self.end += 1
        bodies = self._bodies
        if self._most_bytes is None:
            bodies.append(body)
            return self.end - 1
        if len(bodies) == bodies.maxlen:
            self._bytes -= len(bodies.popleft())
        bodies.append(body)
        self._bytes += len(body)
        while self._bytes > self._most_bytes:
            self._bytes -= len(bodies.popleft())
        return self.end - 1

    @property
    def begin(self) -> int:
        """The sequence of the oldest message that is kept; ``end`` when there is none."""
        return self.end - len(self._bodies)

    def __getitem__(self, sequence: int) -> bytes:
        return self._bodies[sequence - self.begin]

    def since(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Every kept message from ``first`` on; valid until the next ``append``."""
        begin = max(first, self.begin)
        return enumerate(islice(self._bodies, begin - self.begin, None), begin)


class MessagePublisher:
    """Publishes on a PUB socket and answers replay requests on a ROUTER socket, on its own thread.

    A replay request is ``[b"", first sequence (8 bytes, big-endian)]``. The answer is one
    ``[b"", topic, sequence, body]`` for each kept message from that sequence on, and a last one
    with the sequence -1 and an empty body. Readers that do not read cost a bounded number of
    messages: the rest of a replay waits here as a number, and live messages are dropped for them.

    In a run, both are Unix sockets in its folder, which only its user can enter: events name the
    tokens of prompts. On a host that others reach, they are at its address, encrypted, for the
    readers of the run (``kv_events.curve``). A process of no run publishes over TCP at ``host``, to
    everyone who connects.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        topic: str = "",
        keep_messages: int = 10_000,
        keep_bytes: int | None = None,
    ) -> None:
        self._topic = topic.encode()
        self._inbox: queue.SimpleQueue[Callable[[], bytes] | None] = queue.SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(max(1, keep_messages))  # what it drops can still be replayed
        self._replay = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._replay):
            socket.setsockopt(zmq.MAXMSGSIZE, _MOST_READER_BYTES)
        self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or lost reader raises
        self._replay.set_hwm(_REPLAY_HIGH_WATER)
        self._kept = MessageHistory(keep_messages, keep_bytes)
        self._replays: dict[bytes, _Replay] = {}
        self._guard = _guard(self._context)
        if self._guard is not None:
            for socket in (self._pub, self._replay):
                self._guard.protect(socket)
        self.source = EventSource(
            endpoint=_bind(self._pub, host),
            replay_endpoint=_bind(self._replay, host),
            topic=topic,
            server_key=None if self._guard is None else self._guard.public_key,
        )
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def send(self, make_body: Callable[[], bytes]) -> None:
        """Queue a message, whose body the thread makes. Never blocks; any thread may call it."""
        self._inbox.put(make_body)

    def close(self) -> None:
        """Send the queued messages, then close the sockets."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        # A ZMQ socket is for one thread, so this thread also answers replay requests.
        while True:
            try:
                wait_ms = _REPLAYING_POLL_MS if self._replays else _POLL_MS
                make_body = self._inbox.get(timeout=wait_ms / 1000)
            except queue.Empty:
                pass
            else:
                if make_body is None:
                    break
                body = make_body()
                self._pub.send_multipart([self._topic, _packed(self._kept.append(body)), body])
            if self._guard is not None:
                self._guard.work()
            # Also between messages: ZMQ frees a lost connection only when its socket is used.
            self._pub.getsockopt(zmq.EVENTS)
            while int(self._replay.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._take_request()
            self._continue_replays()
        if self._guard is not None:
            self._guard.close()
        self._pub.close(linger=_LINGER_MS)
        self._replay.close(linger=0)
        end_context(self._context)

    def _take_request(self) -> None:
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != _SEQUENCE_BYTES:  # noqa: PLR2004 - identity, empty
            log.warning("KV events: ignored a replay request of %d frames", len(frames))
            return
        identity, _, first = frames
        self._replays.pop(identity, None)
        if len(self._replays) >= _MAX_REPLAYS:
            slowest = min(self._replays, key=lambda reader: self._replays[reader].moved_s)
            del self._replays[slowest]
            log.warning("KV events: ended the replay of a reader that does not read")
        self._replays[identity] = _Replay(int.from_bytes(first, "big"))

    def _continue_replays(self) -> None:
        for identity, replay in list(self._replays.items()):
            if not replay.go_on(self._kept, partial(self._answer, identity)):
                del self._replays[identity]

    def _answer(self, identity: bytes, sequence: int, body: bytes) -> bool | None:
        """Whether ZMQ took the message; None when the reader has gone."""
        frames = [identity, b"", self._topic, _packed(sequence), body]
        try:
            self._replay.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return None
            raise
        return True


class _Replay:
    """One reader's replay: the next message that it gets."""

    def __init__(self, first: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._next = first
        self._clock = clock
        self.moved_s = clock()
        """When the reader last took a message."""

    def go_on(self, kept: MessageHistory, send: Callable[[int, bytes], bool | None]) -> bool:
        """Send until the reader is full. False when the replay is complete or given up."""
        self._next = max(self._next, kept.begin)
        while self._next < kept.end:
            taken = send(self._next, kept[self._next])
            if not taken:
                return self._waits(taken)
            self._next += 1
            self.moved_s = self._clock()
        taken = send(_END, b"")
        return self._waits(taken) if not taken else False

    def _waits(self, taken: bool | None) -> bool:
        return taken is not None and self._clock() - self.moved_s < _STALLED_S


def _guard(context: zmq.Context[zmq.Socket[bytes]]) -> ReaderGuard | None:
    """The guard of the sockets; None where only this machine reaches them, or without TLS."""
    if network_to_guard() is None:
        return None
    secret = secret_of_this_process()
    if secret is None:
        raise EngineError("KV events are published to other hosts, but this process has no secret")
    return ReaderGuard(context, secret)


def _bind(socket: zmq.Socket[bytes], host: str) -> str:
    """Bind a socket that front doors read; returns the endpoint for them."""
    network = network_of_this_process()
    if network is None or not network.spans_hosts:
        return bind_private(socket, host)
    if ":" in network.listen:
        socket.setsockopt(zmq.IPV6, 1)
    port = socket.bind_to_random_port(f"tcp://{in_url(network.listen)}")
    return f"tcp://{in_url(network.advertise)}:{port}"


def bind_private(socket: zmq.Socket[bytes], host: str) -> str:
    """Bind a ZMQ socket; returns the endpoint to connect to.

    In a run it is a Unix socket in its folder, which only its user can enter; otherwise a TCP port
    at ``host``.
    """
    folder = run_folder()
    if folder is None:
        port: int = socket.bind_to_random_port(f"tcp://{host}")
        return f"tcp://{host}:{port}"
    endpoint = f"ipc://{folder}/z{os.getpid()}-{next(_numbers)}"
    socket.bind(endpoint)
    return endpoint


def end_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """End a context whose sockets are closed; waits 0.4 s at most.

    A reader or a worker that leaves at this very moment can make libzmq wait for good, whatever the
    sockets' linger: then its thread stays, until the process ends.
    """
    end = threading.Thread(target=context.term, name="zmq-end", daemon=True)
    end.start()
    end.join(2 * _LINGER_MS / 1000)


def _packed(sequence: int) -> bytes:
    return sequence.to_bytes(_SEQUENCE_BYTES, "big", signed=sequence < 0)

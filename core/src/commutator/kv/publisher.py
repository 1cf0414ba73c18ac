"""Publishes an engine's KV events over ZMQ, and replays what a subscriber missed."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from commutator.kv.events import EventBatch, KvEvent, encode_batch
from commutator.types import EventSource

__all__ = ["EventPublisher"]

log = logging.getLogger(__name__)

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 50


class EventPublisher:
    """PUB for events as they happen, ROUTER for replay, on one thread of their own.

    A replay request is ``[b"", first sequence (8 bytes, big-endian)]``; it is answered with one
    ``[b"", topic, sequence, body]`` for each kept message from there on, and a last one whose
    sequence is -1 and whose body is empty.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        topic: str = "",
        data_parallel_rank: int = 0,
        keep_messages: int = 10_000,
    ) -> None:
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=keep_messages)
        self._inbox: queue.SimpleQueue[EventBatch | None] = queue.SimpleQueue()
        self._sequence = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(100_000)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.set_hwm(0)  # a replay may be every message that is kept
        pub_port = self._pub.bind_to_random_port(f"tcp://{host}")
        replay_port = self._replay.bind_to_random_port(f"tcp://{host}")
        self.source = EventSource(f"tcp://{host}:{pub_port}", f"tcp://{host}:{replay_port}", topic)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Queue one message with ``events``; from any thread, never blocks."""
        if events:
            self._inbox.put(EventBatch(time.time(), tuple(events), self._rank))

    def close(self) -> None:
        """Send what is queued, then close the sockets."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        # ZMQ sockets belong to one thread, so this one also answers replays between messages.
        while True:
            try:
                batch = self._inbox.get(timeout=_POLL_MS / 1000)
            except queue.Empty:
                pass
            else:
                if batch is None:
                    break
                self._send(batch)
            while int(self._replay.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._answer_replay()
        self._pub.close(linger=200)
        self._replay.close(linger=0)
        self._context.term()

    def _send(self, batch: EventBatch) -> None:
        sequence, body = self._sequence.to_bytes(8, "big"), encode_batch(batch)
        self._sequence += 1
        self._kept.append((sequence, body))
        self._pub.send_multipart([self._topic, sequence, body])

    def _answer_replay(self) -> None:
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:  # noqa: PLR2004 - identity, empty, sequence
            log.warning("a replay request of %d frames was ignored", len(frames))
            return
        identity, _, first = frames
        for sequence, body in self._kept:
            if sequence >= first:
                self._replay.send_multipart([identity, b"", self._topic, sequence, body])
        self._replay.send_multipart([identity, b"", self._topic, _END_OF_REPLAY, b""])

"""Publishes an engine's KV events over ZMQ, and replays missed messages."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from commutator.contract.block import EventBatch, KvEvent
from commutator.contract.worker import EventSource
from commutator.kv_events.codec import encode_batch

__all__ = ["EventPublisher"]

log = logging.getLogger(__name__)

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 50


class EventPublisher:
    """Publishes on a PUB socket and answers replay requests on a ROUTER socket, on its own thread.

    A replay request is ``[b"", first sequence (8 bytes, big-endian)]``. The answer is one
    ``[b"", topic, sequence, body]`` for each kept message from that sequence on, and a last one
    with the sequence -1 and an empty body.
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
        self._replay.set_hwm(0)  # a replay may contain every kept message
        pub_port = self._pub.bind_to_random_port(f"tcp://{host}")
        replay_port = self._replay.bind_to_random_port(f"tcp://{host}")
        self.source = EventSource(
            endpoint=f"tcp://{host}:{pub_port}",
            replay_endpoint=f"tcp://{host}:{replay_port}",
            topic=topic,
        )
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Queue one message with these events. Never blocks; any thread may call it."""
        if events:
            self._inbox.put(
                EventBatch(
                    timestamp_s=time.time(), events=tuple(events), data_parallel_rank=self._rank
                )
            )

    def close(self) -> None:
        """Send the queued messages, then close the sockets."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        # A ZMQ socket is for one thread, so this thread also answers replay requests.
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
            log.warning("KV events: ignored a replay request of %d frames", len(frames))
            return
        identity, _, first = frames
        for sequence, body in self._kept:
            if sequence >= first:
                self._replay.send_multipart([identity, b"", self._topic, sequence, body])
        self._replay.send_multipart([identity, b"", self._topic, _END_OF_REPLAY, b""])

"""Publishes an engine's KV events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from commutator.contract.block import EventBatch, KvEvent
from commutator.kv_events import MessagePublisher, encode_batch


class EventPublisher(MessagePublisher):
    """Publishes the events of one data-parallel rank of an engine."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        topic: str = "",
        data_parallel_rank: int = 0,
        keep_messages: int = 10_000,
    ) -> None:
        self._rank = data_parallel_rank
        super().__init__(host, topic=topic, keep_messages=keep_messages)

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Queue one message with these events. Never blocks; any thread may call it."""
        if events:
            batch = EventBatch(
                timestamp_s=time.time(), events=tuple(events), data_parallel_rank=self._rank
            )
            self.send(partial(encode_batch, batch))

"""Passes a worker's KV events on to the event bus, at the worker's host.

Engines publish on sockets of their own, most of them without a proof of who reads. Where front
doors are elsewhere, the host's agent is their only reader: it numbers what it applied in order,
keeps the last messages, and sends them on.
"""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from attrs import evolve

from commutator.contract.event_bus import EventBus, EventOutlet, EventStream
from commutator.contract.worker import EngineInfo, EventSource, WorkerRecord
from commutator.kv_events.publisher import RELAYED_BYTES, RELAYED_MESSAGES, MessageHistory
from commutator.kv_events.subscriber import EventSubscriber, SourceTimes
from commutator.kv_events.zmq_bus import ZmqEventBus
from commutator.trust import is_loopback

log = logging.getLogger(__name__)

_FORGET = b""
"""A message that tells readers to forget every block that earlier messages told of."""


class EventRelay:
    """Publishes the events of one start of a worker. Used from one event loop.

    It does nothing where front doors read the engine itself: on one machine, and where the engine's
    own sockets are made for other hosts and the bus is ``zmq``.
    """

    def __init__(self, bus: EventBus, times: SourceTimes = SourceTimes()) -> None:  # noqa: B008 - frozen
        self._bus = bus
        self._times = times
        self._engines = ZmqEventBus()
        self._read: EventSource | None = None
        """The engine's own source that is read."""
        self._announced: EventSource | None = None
        self._streams: list[_Stream] = []

    async def announced(self, record: WorkerRecord) -> WorkerRecord:
        """``record`` as front doors need it: with the sources that they read on the bus.

        The first call begins to pass on; a later one, after the engine was asked anew, goes on
        from the engine's present sources.
        """
        source = record.info.kv_events
        if source is None:
            return record
        if self._read is None:
            await self._begin(record)
        elif source != self._read:
            await self._read_elsewhere(record.info)
        self._read = source
        if self._announced is None:
            return record
        return evolve(record, info=evolve(record.info, kv_events=self._announced))

    async def close(self) -> None:
        """End the streams. Idempotent."""
        for stream in self._streams:
            await stream.close()
        self._streams.clear()
        await self._engines.close()

    async def _begin(self, record: WorkerRecord) -> None:
        try:
            sources = sources_by_rank(record.info)
        except ValueError as error:  # front doors report it
            log.warning("%s: its KV events cannot be read: %s", record.worker_id, error)
            return
        if self._bus.reads_engines and all(map(_is_for_other_hosts, sources)):
            return
        for rank, source in enumerate(sources):
            name = EventStream(
                model=record.model,
                worker_id=record.worker_id,
                instance=record.instance,
                rank=rank,
            )
            kept = MessageHistory(RELAYED_MESSAGES, RELAYED_BYTES)
            outlet = await self._bus.publish(name, kept)
            if outlet is None:
                return
            stream = _Stream(record.worker_id, kept, outlet)
            self._streams.append(stream)
            stream.read(self._engines, source, self._times)
        if self._streams:
            first, *further = [stream.outlet.source for stream in self._streams]
            self._announced = evolve(first, further_ranks=tuple(further))

    async def _read_elsewhere(self, info: EngineInfo) -> None:
        """The engine restarted behind its address, and publishes at other ones."""
        for stream, source in zip(self._streams, sources_by_rank(info), strict=False):
            await stream.stop_reading()
            stream.reset("the engine publishes elsewhere now")
            stream.read(self._engines, source, self._times)


class _Stream:
    """Takes one rank's messages from the engine, and gives them to the bus."""

    def __init__(self, worker_id: str, kept: MessageHistory, outlet: EventOutlet) -> None:
        self.outlet = outlet
        self._worker_id = worker_id
        self._kept = kept
        self._subscriber: EventSubscriber | None = None

    def read(self, engines: ZmqEventBus, source: EventSource, times: SourceTimes) -> None:
        subscriber = EventSubscriber(engines, source, self, times)
        try:
            subscriber.start()
        except ValueError as error:
            log.warning("%s: its KV events cannot be read: %s", self._worker_id, error)
        else:
            self._subscriber = subscriber

    async def stop_reading(self) -> None:
        if self._subscriber is not None:
            await self._subscriber.close()
            self._subscriber = None

    async def close(self) -> None:
        await self.stop_reading()
        await self.outlet.close()

    def message(self, body: bytes) -> None:
        self.outlet.send(self._kept.append(body), body)

    def reset(self, reason: str) -> None:
        log.warning("%s: %s; front doors drop its blocks", self._worker_id, reason)
        self.message(_FORGET)

    def undecodable(self, error: Exception) -> None:
        log.debug("%s: not passed on: %s", self._worker_id, error)


def _is_for_other_hosts(source: EventSource) -> bool:
    """Whether front doors of other hosts reach it: our publisher, or an engine's in plain text."""
    endpoint = urlsplit(source.endpoint)
    return endpoint.scheme == "tcp" and not is_loopback(endpoint.hostname or "")


def sources_by_rank(info: EngineInfo) -> list[EventSource]:
    """The source of each data-parallel rank, as the engine announced them.

    An engine that names one endpoint for several ranks publishes on consecutive ports. Raises
    ValueError where that endpoint has none.
    """
    source = info.kv_events
    if source is None:
        return []
    if info.data_parallel_size == 1 or source.further_ranks:
        return [source, *source.further_ranks]
    replay = source.replay_endpoint
    return [
        EventSource(
            endpoint=_later_port(source.endpoint, rank),
            replay_endpoint=None if replay is None else _later_port(replay, rank),
            topic=source.topic,
        )
        for rank in range(info.data_parallel_size)
    ]


def _later_port(endpoint: str, by: int) -> str:
    port = urlsplit(endpoint).port
    if port is None:
        raise ValueError(f"{endpoint} has no port to count up from for data-parallel ranks")
    return f"{endpoint.rsplit(':', 1)[0]}:{port + by}"

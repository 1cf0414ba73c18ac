"""Keeps a model's prefix index up to date with the KV events of its workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from urllib.parse import urlsplit

import zmq
from attrs import define, evolve, field, frozen

from commutator.kv.events import BlockStored, EventBatch
from commutator.kv.medium import Tier
from commutator.routing.event_health import Cause, EventHealth, EventWarning
from commutator.routing.event_sequence import Position, SequenceCounters
from commutator.routing.event_source import SourceReader, SourceTimes
from commutator.routing.index_snapshot import WorkerSnapshot
from commutator.routing.prefix_index import PrefixIndex
from commutator.types import EngineInfo, EventSource

__all__ = ["EventSubscriber", "WorkerEvents"]

log = logging.getLogger(__name__)

_REVIEW_INTERVAL_S = 5.0
_FAILED_AFTER = 3
_NO_BLOCKS = (0,) * len(Tier)


@frozen
class WorkerEvents:
    """What came from one worker."""

    messages: int
    decode_errors: int
    checked_prompts: int
    """Prompts that were looked up in the index after the worker had computed them."""
    missing_prompts: int
    """How many of the last of them, in a row, were not found."""
    sources: tuple[SequenceCounters, ...]
    """One for each data-parallel rank that publishes."""
    blocks: tuple[int, ...]
    """What is known of the worker's cache, all ranks together: for each tier, fastest first."""


@define(eq=False)
class _Worker:
    info: EngineInfo
    health: EventHealth
    readers: list[SourceReader] = field(factory=list)
    said: set[Cause] = field(factory=set)
    """The warnings that were logged and still hold."""
    block_size: int = field(init=False)
    """Tokens in one of the engine's blocks, the smallest of its events if they tell another."""

    @block_size.default
    def _announced_block_size(self) -> int:
        return self.info.block_size


@define(eq=False)
class _Sink:
    """One source's way into the index."""

    worker_id: str
    rank: int | None
    """None: the worker has no other source, so this one speaks for all its ranks."""
    index: PrefixIndex
    health: EventHealth
    clock: Callable[[], float]

    def apply(self, batch: EventBatch) -> None:
        self.health.messages += 1
        self.health.prompts.last_message_s = self.clock()
        rank = batch.data_parallel_rank or self.rank or 0
        for event in batch.events:
            self.index.apply(self.worker_id, event, rank)
            if not isinstance(event, BlockStored):
                self.health.prompts.drops += 1

    def reset(self, reason: str) -> None:
        log.warning("worker %s: %s; its blocks are dropped from the index", self.worker_id, reason)
        self.index.reset_worker(self.worker_id, self.rank)
        self.health.prompts.drops += 1

    def undecodable(self, error: Exception) -> None:
        self.health.decode_errors += 1
        log.debug("worker %s sent what is no KV event: %s", self.worker_id, error)


class EventSubscriber:
    """Subscribes to every worker of one model. Used from one event loop; close it at the end."""

    def __init__(
        self,
        index: PrefixIndex,
        times: SourceTimes = SourceTimes(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
        *,
        enabled: bool = True,
    ) -> None:
        """``enabled``: False subscribes to nobody, and finds nothing wrong with that."""
        self.index = index
        self._times = times
        self._clock = clock
        self._enabled = enabled
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._workers: dict[str, _Worker] = {}
        self._restored: dict[str, WorkerSnapshot] = {}
        self._reviews: asyncio.Task[None] | None = None

    async def add_worker(self, worker_id: str, info: EngineInfo) -> None:
        """Subscribe to a worker; one that restarted is added again, and begins with nothing.

        Each data-parallel rank publishes on a port of its own, counted up from the first.
        """
        await self.remove_worker(worker_id)
        if not self._enabled:
            info = evolve(info, kv_events=None)
        endpoint = info.kv_events.endpoint if info.kv_events is not None else None
        health = EventHealth(
            worker_id, endpoint, self.index.block_size, expects_events=self._enabled
        )
        worker = self._workers[worker_id] = _Worker(info, health)
        try:
            self._subscribe(worker_id, worker)
        except ValueError as error:
            health.unreadable = str(error)
        if self._reviews is None:
            self._reviews = asyncio.create_task(self._review_regularly())

    def _subscribe(self, worker_id: str, worker: _Worker) -> None:
        sources = _sources_by_rank(worker.info)
        if not sources:
            return
        positions = self._go_on(worker_id, worker, sources)
        if self._context is None:
            self._context = zmq.Context()
        for rank, (source, position) in enumerate(zip(sources, positions, strict=True)):
            only = len(sources) == 1
            sink = _Sink(worker_id, None if only else rank, self.index, worker.health, self._clock)
            reader = SourceReader(self._context, source, sink, self._times, position)
            reader.start()
            worker.readers.append(reader)

    def _go_on(
        self, worker_id: str, worker: _Worker, sources: Sequence[EventSource]
    ) -> list[Position | None]:
        """Where each source stands in a snapshot, whose knowledge is taken over that far."""
        snapshot = self._restored.pop(worker_id, None)
        if snapshot is None:
            return [None] * len(sources)
        positions = [snapshot.positions.get(source.endpoint) for source in sources]
        going_on = {rank for rank, position in enumerate(positions) if position is not None}
        if going_on:
            worker.health.messages = snapshot.messages
            worker.health.prompts.last_message_s = self._clock()
            only = len(sources) == 1
            self.index.restore(
                worker_id, [rank for rank in snapshot.ranks if only or rank.rank in going_on]
            )
        return positions

    async def remove_worker(self, worker_id: str) -> None:
        """Unsubscribe, and forget what the worker held. Unknown workers are ignored."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            await asyncio.gather(*(reader.close() for reader in worker.readers))
            self.index.remove_worker(worker_id)

    def computed(self, worker_id: str, sequence_hashes: Sequence[int]) -> None:
        """The worker has computed this prompt: its first token came. Its events must tell soon."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            told = sequence_hashes[: self._in_whole_blocks(worker, len(sequence_hashes))]
            holds = partial(self.index.holds, worker_id)
            worker.health.prompts.computed(told, holds, self._clock())

    def warnings(self) -> list[EventWarning]:
        """What is wrong now, by worker; new problems are logged once."""
        now_s = self._clock()
        found: list[EventWarning] = []
        for worker_id, worker in self._workers.items():
            lost = sum(reader.sequence.counters.lost for reader in worker.readers)
            ranks = self.index.rank_statistics(worker_id).values()
            orphans = sum(rank.orphans for rank in ranks)
            worker.block_size = min(
                (size for rank in ranks for size in rank.block_sizes), default=worker.block_size
            )
            unanswered = [
                str(reader.source.replay_endpoint)
                for reader in worker.readers
                if reader.sequence.failed_in_a_row >= _FAILED_AFTER
            ]
            holds = partial(self.index.holds, worker_id)
            worker.health.review(now_s, holds, lost, orphans, unanswered)
            warnings = worker.health.warnings(worker.info.block_size, ranks)
            _say(worker, warnings)
            found += warnings
        return found

    def statistics(self) -> dict[str, WorkerEvents]:
        """By worker."""
        held = self.index.blocks_by_worker()
        return {
            worker_id: WorkerEvents(
                messages=worker.health.messages,
                decode_errors=worker.health.decode_errors,
                checked_prompts=worker.health.prompts.checked,
                missing_prompts=worker.health.prompts.missing,
                sources=tuple(evolve(reader.sequence.counters) for reader in worker.readers),
                blocks=held.get(worker_id, _NO_BLOCKS),
            )
            for worker_id, worker in self._workers.items()
        }

    def workers(self) -> list[str]:
        """Those whose events are read."""
        return [worker_id for worker_id, worker in self._workers.items() if worker.readers]

    def snapshot(self, worker_id: str) -> WorkerSnapshot | None:
        """What a worker's events have told so far; None when they are not read."""
        worker = self._workers.get(worker_id)
        if worker is None or not worker.readers:
            return None
        return WorkerSnapshot(
            worker_id=worker_id,
            messages=worker.health.messages,
            positions={
                reader.source.endpoint: reader.sequence.position
                for reader in worker.readers
                if reader.sequence.position is not None
            },
            ranks=self.index.snapshot(worker_id),
        )

    def restore(self, snapshot: WorkerSnapshot) -> None:
        """Start warm: keep a snapshot until its worker is added.

        Its sources then go on after their last messages in the snapshot; one whose next message
        cannot be had any more starts over, as after any loss.
        """
        self._restored[snapshot.worker_id] = snapshot

    def forget_snapshots(self) -> None:
        """The workers that were there have been added; other snapshots are of no use."""
        self._restored.clear()

    async def close(self) -> None:
        """Unsubscribe from everything. The index keeps what it knows."""
        if self._reviews is not None:
            self._reviews.cancel()
            await asyncio.gather(self._reviews, return_exceptions=True)
        readers = [reader for worker in self._workers.values() for reader in worker.readers]
        await asyncio.gather(*(reader.close() for reader in readers))
        self._workers.clear()
        if self._context is not None:
            self._context.term()
            self._context = None

    def _in_whole_blocks(self, worker: _Worker, blocks: int) -> int:
        """How many of the first so many blocks lie in full blocks of the engine."""
        parts, rest = divmod(worker.block_size, self.index.block_size)
        return blocks if rest or not parts else blocks - blocks % parts

    async def _review_regularly(self) -> None:
        while True:
            await asyncio.sleep(_REVIEW_INTERVAL_S)
            self.warnings()


def _sources_by_rank(info: EngineInfo) -> list[EventSource]:
    """The source of each rank, as vLLM and SGLang number their ports."""
    source = info.kv_events
    if source is None:
        return []
    if info.data_parallel_size == 1 or source.further_ranks:
        return [source, *source.further_ranks]
    replay = source.replay_endpoint
    return [
        EventSource(
            _next_port(source.endpoint, rank),
            None if replay is None else _next_port(replay, rank),
            source.topic,
        )
        for rank in range(info.data_parallel_size)
    ]


def _next_port(endpoint: str, by: int) -> str:
    port = urlsplit(endpoint).port
    if port is None:
        raise ValueError(f"{endpoint} has no port to count up from for data-parallel ranks")
    return f"{endpoint.rsplit(':', 1)[0]}:{port + by}"


def _say(worker: _Worker, warnings: list[EventWarning]) -> None:
    causes = {warning.cause for warning in warnings}
    for warning in warnings:
        if warning.cause not in worker.said:
            log.warning("%s", warning.message)
    for cause in worker.said - causes:
        log.info("worker %s: its KV events are no longer %s", worker.health.worker_id, cause)
    worker.said = causes

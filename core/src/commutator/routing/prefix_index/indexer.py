"""A model's prefix index: fed by the KV events of its workers, or guessed from what was routed."""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from attrs import Factory, define, evolve, field, frozen

from commutator.contract.block import BlockStored, CacheLevel
from commutator.contract.capability import Operation
from commutator.contract.event_bus import EventBus
from commutator.contract.request import GenerateRequest
from commutator.contract.routing import Overlap, RouterConfig, WorkerRank
from commutator.contract.worker import EngineInfo, EventSource, WorkerRecord
from commutator.kv_events.codec import decode_batch
from commutator.kv_events.relay import sources_by_rank
from commutator.kv_events.sequence import Position, SequenceCounters
from commutator.kv_events.subscriber import EventSubscriber, SourceTimes
from commutator.kv_events.zmq_bus import ZmqEventBus
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.health import Cause, EventHealth, EventWarning
from commutator.routing.prefix_index.index import PrefixIndex, RankSnapshot
from commutator.routing.prefix_index.prefix_map import PrefixMatch

log = logging.getLogger(__name__)

_REVIEW_INTERVAL_S = 5.0
_SLICE_WORKERS = 64
_SLICE_BLOCKS = 4096
"""Guessed blocks that one look-up drops at most: about two milliseconds."""
_FAILED_AFTER = 3
"""Replays that fail one after another before the endpoint counts as unanswered."""
_NO_BLOCKS = (0,) * len(CacheLevel)


@frozen
class WorkerEvents:
    """Counts of one worker's KV events."""

    messages: int
    decode_errors: int
    sources: tuple[SequenceCounters, ...]
    """One for each data-parallel rank that publishes."""
    blocks: tuple[int, ...]
    """Blocks in the index, all ranks together, for each cache level, fastest first."""


@frozen
class WorkerSnapshot:
    """What the index knows of a worker, and the last event messages of that knowledge."""

    worker_id: str
    messages: int
    """Messages that have been applied."""
    positions: Mapping[str, Position]
    """The last message of each source, by the source's endpoint."""
    ranks: list[RankSnapshot]

    @property
    def blocks(self) -> int:
        """Held blocks, in all ranks and cache levels together."""
        return sum(len(held) for rank in self.ranks for held in rank.held.values())


@define(eq=False)
class _Worker:
    info: EngineInfo
    health: EventHealth
    subscribers: list[EventSubscriber] = field(factory=list)
    logged: set[Cause] = field(factory=set)
    """Warnings that were logged and still hold."""
    block_size: int = Factory(lambda self: self.info.block_size, takes_self=True)
    """Tokens in the smallest block of the worker's events, or as announced before any event."""


@define(eq=False)
class _Sink:
    """Applies one source's events to the index."""

    worker_id: str
    rank: int | None
    """None: the worker's only source, which publishes for all its ranks."""
    index: PrefixIndex
    health: EventHealth
    clock: Callable[[], float]

    def message(self, body: bytes) -> None:
        try:
            batch = decode_batch(body)
            self.health.messages += 1
            self.health.prompts.last_message_s = self.clock()
            rank = batch.data_parallel_rank or self.rank or 0
            for event in batch.events:
                self.index.apply(self.worker_id, event, rank)
                if not isinstance(event, BlockStored):
                    self.health.prompts.drops += 1
        except Exception as error:  # noqa: BLE001 - a bad message must not stop the next
            self.undecodable(error)

    def reset(self, reason: str) -> None:
        log.warning("worker %s: %s; its blocks are dropped from the index", self.worker_id, reason)
        self.index.reset_worker(self.worker_id, self.rank)
        self.health.prompts.drops += 1

    def undecodable(self, error: Exception) -> None:
        self.health.decode_errors += 1
        log.debug("worker %s: a message is no KV event: %s", self.worker_id, error)


class KvIndexer:
    """What each worker of one model holds. Used from one event loop; close it at the end.

    Exact for workers that publish KV events. For others, and with ``use_kv_events: false``, the
    blocks of routed prompts are assumed to stay for ``router_ttl_s``.
    """

    def __init__(
        self,
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
        times: SourceTimes = SourceTimes(),  # noqa: B008 - frozen
        bus: EventBus | None = None,
    ) -> None:
        """``bus``: closed by the caller; None: a ``zmq`` of its own."""
        self.index = PrefixIndex(config.block_size)
        self.exact = frozenset[str]()
        """Ids of the workers whose events are read. Replaced, never changed: decisions keep it."""
        self._config = config
        self._clock = clock
        self._times = times
        self._guessed = GuessedBlocks(self.index, config.router_ttl_s)
        self._owns_bus = bus is None
        self._bus = bus or ZmqEventBus()
        self._workers: dict[str, _Worker] = {}
        self._restored: dict[str, WorkerSnapshot] = {}
        self._reviews: asyncio.Task[None] | None = None

    def serves(self, config: RouterConfig) -> bool:
        """Whether an indexer with this configuration would know the same."""
        names = ("block_size", "use_kv_events", "router_ttl_s")
        return all(getattr(config, name) == getattr(self._config, name) for name in names)

    async def add(self, record: WorkerRecord) -> None:
        """Subscribe to a worker; an earlier worker of the same id is forgotten."""
        worker_id, info, enabled = record.worker_id, record.info, self._config.use_kv_events
        await self.remove(worker_id)
        if not enabled:
            log.info(
                "worker %s: its cached blocks are guessed from the requests it was sent, because "
                "router.use_kv_events is false",
                worker_id,
            )
            info = evolve(info, kv_events=None)
        endpoint = info.kv_events.endpoint if info.kv_events is not None else None
        expected = enabled and Operation.GENERATE in info.operations
        health = EventHealth(worker_id, endpoint, self.index.block_size, expects_events=expected)
        worker = self._workers[worker_id] = _Worker(info, health)
        try:
            self._subscribe(worker_id, worker)
        except ValueError as error:
            health.unreadable = str(error)
        if worker.subscribers:
            self.exact |= {worker_id}
        if self._reviews is None:
            self._reviews = asyncio.create_task(self._review_regularly())

    async def follow(self, records: Iterable[WorkerRecord]) -> None:
        """Add those of ``records`` that are not known, and remove all other workers."""
        wanted = {record.worker_id: record for record in records}
        for worker_id in self._workers.keys() - wanted.keys():
            await self.remove(worker_id)
        for worker_id in wanted.keys() - self._workers.keys():
            await self.add(wanted[worker_id])

    async def remove(self, worker_id: str) -> None:
        """Unsubscribe from a worker and forget its blocks. Unknown workers are ignored."""
        self.exact -= {worker_id}
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            # To its end, also when a newer change of the worker cancels this one.
            closing = asyncio.gather(*(each.close() for each in worker.subscribers))
            await asyncio.shield(closing)
        for _ in self.index.detach(worker_id):
            await asyncio.sleep(0)  # requests come first
        self._guessed.forget(worker_id)

    def hashes(self, request: GenerateRequest) -> list[int]:
        """The sequence hashes of the prompt's full blocks."""
        return sequence_hashes(
            request.token_ids,
            self.index.block_size,
            adapter=request.adapter_digest,
            cache_salt=request.cache_salt,
            media=request.media,
        )

    def match(self, hashes: Sequence[int]) -> Mapping[WorkerRank, Overlap]:
        """The overlap of each rank with the prompt."""
        self._guessed.expire(self._clock())
        return self.index.match(hashes)

    def find(self, hashes: Sequence[int]) -> PrefixMatch:
        """``match`` by the numbers of ``PrefixIndex.slot_of``, without an entry for each rank."""
        self._guessed.expire(self._clock())
        return self.index.find(hashes)

    def routed(self, record: WorkerRecord, rank: int, hashes: Sequence[int]) -> None:
        """A prompt was sent to a data-parallel rank of the worker."""
        if record.worker_id not in self.exact:
            capacity = record.info.rank_capacity_blocks(self.index.block_size)
            owner = WorkerRank(record.worker_id, rank)
            self._guessed.routed(owner, hashes, capacity or None, self._clock())

    def computed(self, worker_id: str, hashes: Sequence[int]) -> None:
        """The worker has sent its first token for this prompt, so its events must soon hold it."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            published = hashes[: self._in_whole_blocks(worker, len(hashes))]
            holds = partial(self.index.holds, worker_id)
            worker.health.prompts.computed(published, holds, self._clock())

    def warnings(self) -> list[EventWarning]:
        """Why the index may be wrong about a worker; each new warning is logged once."""
        return [warning for found in self.reviewing() for warning in found]

    def reviewing(self) -> Iterator[list[EventWarning]]:
        """``warnings`` in slices of some workers each, for loops that serve requests between."""
        worker_ids = list(self._workers)
        for begin in range(0, len(worker_ids), _SLICE_WORKERS):
            found: list[EventWarning] = []
            for worker_id in worker_ids[begin : begin + _SLICE_WORKERS]:
                if (worker := self._workers.get(worker_id)) is not None:
                    found += self._review(worker_id, worker)
            yield found

    def _review(self, worker_id: str, worker: _Worker) -> list[EventWarning]:
        now_s = self._clock()
        lost = sum(each.sequence.counters.lost for each in worker.subscribers)
        ranks = self.index.worker_ranks(worker_id).values()
        worker.block_size = min(
            (size for rank in ranks for size in rank.block_sizes), default=worker.block_size
        )
        unanswered = [
            str(each.source.replay_endpoint)
            for each in worker.subscribers
            if each.sequence.failed_in_a_row >= _FAILED_AFTER
        ]
        worker.health.prompts.review(partial(self.index.holds, worker_id), now_s)
        size = worker.info.block_size
        warnings = worker.health.warnings(now_s, size, ranks, lost, unanswered)
        _log_changes(worker, warnings)
        return warnings

    def statistics(self) -> dict[str, WorkerEvents]:
        """Counts of each worker's events, by worker id."""
        self._guessed.expire(self._clock())
        held = self.index.blocks_by_worker()
        return {
            worker_id: WorkerEvents(
                messages=worker.health.messages,
                decode_errors=worker.health.decode_errors,
                sources=tuple(evolve(each.sequence.counters) for each in worker.subscribers),
                blocks=held.get(worker_id, _NO_BLOCKS),
            )
            for worker_id, worker in self._workers.items()
        }

    def snapshot(self, worker_id: str) -> WorkerSnapshot | None:
        """What a worker's events have brought so far; None when they are not read."""
        worker = self._workers.get(worker_id)
        if worker is None or not worker.subscribers:
            return None
        return WorkerSnapshot(
            worker_id=worker_id,
            messages=worker.health.messages,
            positions={
                each.source.endpoint: each.sequence.position
                for each in worker.subscribers
                if each.sequence.position is not None
            },
            ranks=self.index.snapshot(worker_id),
        )

    def restore(self, snapshot: WorkerSnapshot) -> None:
        """Keep another front door's snapshot for when its worker is added.

        The worker's sources then continue after their last messages in the snapshot. A source
        whose next message is lost starts over, as after any loss.
        """
        self._restored[snapshot.worker_id] = snapshot

    def forget_snapshots(self) -> None:
        """Drop the snapshots of workers that were not added."""
        self._restored.clear()

    async def close(self) -> None:
        """Unsubscribe from every worker. The index keeps its blocks."""
        if self._reviews is not None:
            self._reviews.cancel()
            await asyncio.gather(self._reviews, return_exceptions=True)
        subscribers = [each for worker in self._workers.values() for each in worker.subscribers]
        await asyncio.gather(*(each.close() for each in subscribers))
        self._workers.clear()
        if self._owns_bus:
            await self._bus.close()

    def _subscribe(self, worker_id: str, worker: _Worker) -> None:
        sources = sources_by_rank(worker.info)
        if not sources:
            return
        positions = self._take_snapshot(worker_id, worker, sources)
        for rank, (source, position) in enumerate(zip(sources, positions, strict=True)):
            only = len(sources) == 1
            sink = _Sink(worker_id, None if only else rank, self.index, worker.health, self._clock)
            subscriber = EventSubscriber(self._bus, source, sink, self._times, position)
            subscriber.start()
            worker.subscribers.append(subscriber)

    def _take_snapshot(
        self, worker_id: str, worker: _Worker, sources: Sequence[EventSource]
    ) -> list[Position | None]:
        """Restore the worker's snapshot if there is one; returns where each source continues."""
        snapshot = self._restored.pop(worker_id, None)
        if snapshot is None:
            return [None] * len(sources)
        positions = [snapshot.positions.get(source.endpoint) for source in sources]
        known = {rank for rank, position in enumerate(positions) if position is not None}
        if known:
            worker.health.messages = snapshot.messages
            worker.health.prompts.last_message_s = self._clock()
            only = len(sources) == 1
            ranks = [rank for rank in snapshot.ranks if only or rank.rank in known]
            self.index.restore(worker_id, ranks)
        return positions

    def _in_whole_blocks(self, worker: _Worker, blocks: int) -> int:
        """How many of the first ``blocks`` blocks belong to full blocks of the engine."""
        parts, rest = divmod(worker.block_size, self.index.block_size)
        return blocks if rest or not parts else blocks - blocks % parts

    async def _review_regularly(self) -> None:
        while True:
            await asyncio.sleep(_REVIEW_INTERVAL_S)
            for _ in self.reviewing():
                await asyncio.sleep(0)  # requests come first


class GuessedBlocks:
    """Assumes that the blocks of a routed prompt stay in the cache of its rank for a while. Pure.

    They are dropped ``ttl_s`` seconds after they were last routed there. The least recently used
    are dropped earlier when there are more than the rank's cache can hold.
    """

    def __init__(self, index: PrefixIndex, ttl_s: float) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._used_s: dict[WorkerRank, OrderedDict[int, float]] = {}
        """For each rank, the time of last use by sequence hash, least recently used first."""
        self._due: list[tuple[float, WorkerRank]] = []
        """A heap with one entry for each rank: its blocks were all used then, or later."""

    def routed(
        self,
        owner: WorkerRank,
        sequence_hashes: Sequence[int],
        capacity_blocks: int | None,
        now_s: float,
    ) -> None:
        """A prompt with these blocks was sent to ``owner``. None: its capacity is unknown."""
        used = self._used_s.get(owner)
        if used is None:
            used = self._used_s[owner] = OrderedDict()
            heapq.heappush(self._due, (now_s, owner))
        # From the end to the beginning: what prompts share most must be dropped last.
        for block in reversed(sequence_hashes):
            used[block] = now_s
            used.move_to_end(block)
        self._index.store(owner.worker_id, sequence_hashes, rank=owner.rank)
        if capacity_blocks is not None:
            self._drop(owner, max(0, len(used) - capacity_blocks))

    def expire(self, now_s: float, most: int = _SLICE_BLOCKS) -> None:
        """Drop blocks that were not used for too long; call it before each look-up.

        Drops about ``most`` blocks; the others at the next call.
        """
        due, left = self._due, most
        while due and left and due[0][0] + self._ttl_s <= now_s:
            _, owner = heapq.heappop(due)
            used = self._used_s[owner]
            count = 0
            for last_used_s in islice(used.values(), left):
                if last_used_s + self._ttl_s > now_s:
                    break
                count += 1
            self._drop(owner, count)
            left -= count
            oldest_s = next(iter(used.values()), None)
            if oldest_s is None:
                del self._used_s[owner]
            else:
                heapq.heappush(due, (oldest_s, owner))

    def forget(self, worker_id: str) -> None:
        """Drop all blocks of a worker."""
        gone = [owner for owner in self._used_s if owner.worker_id == worker_id]
        for owner in gone:
            del self._used_s[owner]
        if gone:
            self._due = [entry for entry in self._due if entry[1].worker_id != worker_id]
            heapq.heapify(self._due)
            self._index.remove_worker(worker_id)

    def _drop(self, owner: WorkerRank, count: int) -> None:
        if count:
            used = self._used_s[owner]
            dropped = [used.popitem(last=False)[0] for _ in range(count)]
            self._index.remove(owner.worker_id, dropped, rank=owner.rank)


def _log_changes(worker: _Worker, warnings: list[EventWarning]) -> None:
    causes = {warning.cause for warning in warnings}
    for warning in warnings:
        if warning.cause not in worker.logged:
            log.warning("%s", warning.message)
    for cause in worker.logged - causes:
        log.info("worker %s: KV event warning %s has ended", worker.health.worker_id, cause)
    worker.logged = causes

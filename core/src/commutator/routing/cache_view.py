"""What the workers of one model hold in their KV caches, as far as this front door knows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from commutator.config.model import RouterConfig
from commutator.kv.hashing import sequence_hashes
from commutator.routing.approximate import ApproximateBlocks
from commutator.routing.event_health import EventWarning
from commutator.routing.event_subscriber import EventSubscriber, WorkerEvents
from commutator.routing.index_snapshot import WorkerSnapshot
from commutator.routing.overlap import Overlap, WorkerRank
from commutator.routing.prefix_index import PrefixIndex
from commutator.types import GenerateRequest, WorkerRecord

__all__ = ["CacheView"]

log = logging.getLogger(__name__)


class CacheView:
    """Exact for workers that publish KV events, a guess for those that do not."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self.index = PrefixIndex(config.block_size)
        self._subscriber = EventSubscriber(self.index, clock=clock, enabled=config.use_kv_events)
        self._approximate = ApproximateBlocks(self.index, config.router_ttl_s)
        self.exact = frozenset[str]()
        """The workers that tell what they hold. Never changed in place: decisions refer to it."""

    def serves(self, config: RouterConfig) -> bool:
        """Whether a pool with this configuration would see the same."""
        names = ("block_size", "use_kv_events", "router_ttl_s")
        return all(getattr(config, name) == getattr(self._config, name) for name in names)

    async def add(self, record: WorkerRecord) -> None:
        """A worker is up; one of the same id that was there before is forgotten."""
        await self.remove(record.worker_id)
        if not self._config.use_kv_events:
            log.info(
                "worker %s: what it has cached is guessed from what it was sent, as "
                "router.use_kv_events is false",
                record.worker_id,
            )
        await self._subscriber.add_worker(record.worker_id, record.info)
        if record.worker_id in self._subscriber.workers():
            self.exact |= {record.worker_id}

    async def remove(self, worker_id: str) -> None:
        """A worker is gone, and its blocks with it."""
        self.exact -= {worker_id}
        await self._subscriber.remove_worker(worker_id)
        self._approximate.forget(worker_id)

    def hashes(self, request: GenerateRequest) -> list[int]:
        """The sequence hashes of the prompt's full blocks."""
        return sequence_hashes(
            request.token_ids,
            self.index.block_size,
            lora_name=request.lora_name,
            cache_salt=request.cache_salt,
        )

    def match(self, hashes: Sequence[int]) -> Mapping[WorkerRank, Overlap]:
        """What each worker's rank holds of the prompt."""
        self._approximate.expire(self._clock())
        return self.index.match(hashes)

    def routed(self, record: WorkerRecord, rank: int, hashes: Sequence[int]) -> None:
        """A prompt was sent to a data-parallel rank of the worker."""
        if record.worker_id not in self.exact:
            capacity = record.info.rank_capacity_blocks(self.index.block_size)
            owner = WorkerRank(record.worker_id, rank)
            self._approximate.routed(owner, hashes, capacity or None, self._clock())

    def computed(self, worker_id: str, hashes: Sequence[int]) -> None:
        """The worker has computed the prompt, so its events must soon tell of it."""
        self._subscriber.computed(worker_id, hashes)

    def warnings(self) -> list[EventWarning]:
        """Why some overlap may silently be wrong, by worker."""
        return self._subscriber.warnings()

    def statistics(self) -> dict[str, WorkerEvents]:
        """What came from each worker, and how much of its cache is known."""
        self._approximate.expire(self._clock())
        return self._subscriber.statistics()

    def publishing(self) -> list[str]:
        """The workers whose events are read."""
        return self._subscriber.workers()

    def snapshot(self, worker_id: str) -> WorkerSnapshot | None:
        """What one of them is known to hold; see ``restore``."""
        return self._subscriber.snapshot(worker_id)

    def restore(self, snapshot: WorkerSnapshot) -> None:
        """Start warm, with what another front door knows of a worker that is not added yet."""
        self._subscriber.restore(snapshot)

    def forget_snapshots(self) -> None:
        """Every worker has been added."""
        self._subscriber.forget_snapshots()

    async def close(self) -> None:
        await self._subscriber.close()

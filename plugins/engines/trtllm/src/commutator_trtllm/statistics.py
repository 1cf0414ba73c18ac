"""What a server's JSON statistics tell of its KV cache and of its load. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from commutator.types import EngineLoad
from commutator_trtllm.api import IterationStats, KvCacheStats

__all__ = ["LatestStatistics"]


@define
class LatestStatistics:
    """The last statistics of each rank. Each is told only once, so they are kept here."""

    _ranks: dict[int, IterationStats] = field(factory=dict)

    def add(self, stats: Iterable[IterationStats]) -> None:
        """Take what was told since, oldest first."""
        for each in stats:
            self._ranks[each.attention_dp_rank or 0] = each

    @property
    def block_size(self) -> int:
        """Tokens in a block; 0 while nothing was told."""
        return max((kv.tokens_per_block for kv in self._caches()), default=0)

    @property
    def capacity_blocks(self) -> int:
        """KV blocks of all ranks; 0 while nothing was told."""
        return sum(kv.max_num_blocks for kv in self._caches())

    def load(self) -> EngineLoad:
        """Sums over the ranks. Blocks that are only cached are free ones to TensorRT-LLM."""
        running = waiting = 0
        for stats in self._ranks.values():
            batch = stats.inflight_batching_stats
            running += stats.num_active_requests
            waiting += stats.num_queued_requests + (batch.num_paused_requests if batch else 0)
        return EngineLoad(
            running=running,
            waiting=waiting,
            kv_used_blocks=sum(kv.used_num_blocks for kv in self._caches()),
            kv_capacity_blocks=self.capacity_blocks,
        )

    def _caches(self) -> Iterable[KvCacheStats]:
        return [s.kv_cache_stats for s in self._ranks.values() if s.kv_cache_stats is not None]

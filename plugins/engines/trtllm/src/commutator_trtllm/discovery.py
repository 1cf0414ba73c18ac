"""What a running server says about itself: an EngineInfo, and its latest statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
from attrs import define, field

from commutator import EngineInfo, EngineLoad, OptionType, RequestOption
from commutator.errors import EngineError
from commutator_engine_kit.completions import CONSTRAINTS, ModelList, Version
from commutator_engine_kit.http import HttpServer
from commutator_trtllm.handover import handover_info
from commutator_trtllm.messages import COMPLETIONS

__all__ = ["LatestStatistics", "discover", "iteration_stats"]

# There are no statistics before the engine's first step, so one token is generated.
_ONE_TOKEN = {"prompt": [1], "max_tokens": 1, "temperature": 0.0, "detokenize": False}
_STATISTICS_TRIES = 20

_OPTIONS = {
    "top_p_min": RequestOption(
        type=OptionType.NUMBER,
        minimum=0,
        maximum=1,
        description="Where a top_p that decays ends.",
    )
}


class KvCacheStats(msgspec.Struct, rename="camel"):
    """Part of ``IterationStats``."""

    max_num_blocks: int = 0
    used_num_blocks: int = 0
    free_num_blocks: int = 0
    tokens_per_block: int = 0


class InflightBatchingStats(msgspec.Struct, rename="camel"):
    """Part of ``IterationStats``."""

    num_paused_requests: int = 0


class IterationStats(msgspec.Struct, rename="camel"):
    """One entry of GET /metrics: the state after one step of the engine or of one of its ranks."""

    num_active_requests: int = 0
    num_queued_requests: int = 0
    attention_dp_rank: int | None = None
    kv_cache_stats: KvCacheStats | None = None
    inflight_batching_stats: InflightBatchingStats | None = None


@define
class LatestStatistics:
    """The last statistics of each rank. The server returns each only once."""

    _ranks: dict[int, IterationStats] = field(factory=dict)

    def add(self, stats: Iterable[IterationStats]) -> None:
        """Add new statistics, oldest first."""
        for each in stats:
            self._ranks[each.attention_dp_rank or 0] = each

    @property
    def block_size(self) -> int:
        """Tokens in a block; 0 before the first statistics."""
        return max((kv.tokens_per_block for kv in self._caches()), default=0)

    @property
    def capacity_blocks(self) -> int:
        """KV blocks of all ranks; 0 before the first statistics."""
        return sum(kv.max_num_blocks for kv in self._caches())

    def load(self) -> EngineLoad:
        """The load, summed over the ranks. Blocks that are cached but not in use count as free."""
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


async def discover(
    server: HttpServer, statistics: LatestStatistics, *, max_model_len: int, hands_over: bool
) -> EngineInfo:
    """Describe a server. Generates one token, and adds the statistics to ``statistics``.

    Raises EngineUnavailableError while the server is not ready, and EngineError when it cannot
    be used as it is.
    """
    await server.ask("/health")
    version = await server.read("/version", Version)
    models = await server.read("/v1/models", ModelList)
    if not models.data:
        raise EngineError(f"{server.where} serves no model")
    model = models.data[0].id
    await server.ask(COMPLETIONS, method="POST", body={"model": model, **_ONE_TOKEN})
    for _ in range(_STATISTICS_TRIES):
        statistics.add(await iteration_stats(server))
        if statistics.block_size and statistics.capacity_blocks:
            break
        await asyncio.sleep(0.1)
    else:
        raise EngineError(
            f"{server.url}/metrics has no KV cache statistics: start the server with "
            "`enable_iter_perf_stats: true`, and let no other client read /metrics"
        )
    size = statistics.block_size
    return EngineInfo(
        kind="trtllm",
        version=version.version,
        model=model,
        max_model_len=max_model_len,
        block_size=size,
        kv_capacity_blocks=statistics.capacity_blocks,
        continues_answers=True,
        forwards=True,
        constraints=CONSTRAINTS,
        request_options=_OPTIONS,
        keeps_salts_apart=False,
        handover=handover_info(model, version.version, size) if hands_over else None,
    )


async def iteration_stats(server: HttpServer) -> list[IterationStats]:
    """Those that were not returned before. The server waits briefly when there are none."""
    return await server.read("/metrics", list[IterationStats])

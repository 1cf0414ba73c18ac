"""The sidecar of a server: what the server says about itself, its KV events and its statistics.

The server returns each event and each figure only once, so the sidecar is their only reader. It
publishes the events over ZMQ, as other engines do, and serves the rest over HTTP to
``TrtllmClient``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from attrs import define, evolve, field, frozen
from msgspec import json

from commutator import EngineInfo, EngineLoad, OptionType, RequestOption
from commutator.errors import EngineError, EngineUnavailableError
from commutator_engine_kit import EventPublisher
from commutator_engine_kit.completions import CONSTRAINTS, ModelList, Version
from commutator_engine_kit.http import HttpServer
from commutator_trtllm.client import INFO, LOAD, SidecarInfo
from commutator_trtllm.event_translator import CacheEvent, EventTranslator
from commutator_trtllm.handover import handover_info
from commutator_trtllm.messages import COMPLETIONS

log = logging.getLogger(__name__)

_RETRY_S = 0.5
# The server delays an empty answer, but not one that has entries: polls need a pause of their own.
_POLL_S = 0.05
_ANSWER_S = 30.0

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


@frozen(kw_only=True)
class SidecarOptions:
    """The server's address, and what the server does not report."""

    url: str
    host: str = "127.0.0.1"
    """Where the sidecar listens and publishes."""
    port: int = 0
    max_model_len: int
    """Longest prompt plus answer, in tokens."""
    kv_events: bool = True
    hands_over: bool = False


class Sidecar:
    """Follows one server while ``running`` lasts."""

    def __init__(self, options: SidecarOptions) -> None:
        self._options = options
        self._statistics = LatestStatistics()
        self._translator: EventTranslator | None = None
        self._publisher = EventPublisher(options.host) if options.kv_events else None
        self._info: SidecarInfo | None = None
        self._problem = f"TensorRT-LLM at {options.url} is not ready yet"
        self._stopping = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Yields the address for ``TrtllmClient``."""
        app = web.Application()
        app.router.add_get(INFO, self._answer_info)
        app.router.add_get(LOAD, self._answer_load)
        runner = web.AppRunner(app, access_log=None, auto_decompress=False)
        await runner.setup()
        await web.TCPSite(runner, self._options.host, self._options.port).start()
        following = asyncio.create_task(self._follow())
        try:
            yield f"http://{self._options.host}:{runner.addresses[0][1]}"
        finally:
            self._stopping = True
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await runner.cleanup()
            if self._publisher is not None:
                await asyncio.to_thread(self._publisher.close)

    async def _follow(self) -> None:
        server = HttpServer("TensorRT-LLM", self._options.url, answer_timeout_s=_ANSWER_S)
        try:
            # A task group whose members fail as it is cancelled raises their errors only, so being
            # cancelled does not end this loop for certain.
            while not self._stopping:
                await self._follow_until_lost(server)
                await asyncio.sleep(_RETRY_S)
        finally:
            await server.close()

    async def _follow_until_lost(self, server: HttpServer) -> None:
        try:
            await self._follow_once(server)
        except* EngineError as failed:
            self._lost(str(failed.exceptions[0]))
        except* Exception as failed:
            log.exception("the sidecar of %s failed, and starts again", server.url)
            self._lost(f"the sidecar failed: {failed.exceptions[0]!r}")

    async def _follow_once(self, server: HttpServer) -> None:
        options, self._statistics = self._options, LatestStatistics()
        info = await discover(
            server,
            self._statistics,
            max_model_len=options.max_model_len,
            hands_over=options.hands_over,
        )
        if self._publisher is not None:
            info = evolve(info, kv_events=self._publisher.source)
        self._info = SidecarInfo(options.url, info)
        log.info("TensorRT-LLM %s at %s serves %s", info.version, options.url, info.model)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_statistics(server))
            if self._publisher is not None:
                group.create_task(self._read_events(server, self._publisher, info.block_size))

    def _lost(self, problem: str) -> None:
        if problem != self._problem:
            log.log(logging.INFO if self._info is None else logging.WARNING, "%s", problem)
        self._info, self._problem = None, problem

    async def _read_statistics(self, server: HttpServer) -> None:
        while True:
            self._statistics.add(await iteration_stats(server))
            await asyncio.sleep(_POLL_S)

    async def _read_events(
        self, server: HttpServer, publisher: EventPublisher, block_size: int
    ) -> None:
        translator = self._translator
        if translator is None or translator.block_size != block_size:
            if translator is not None:
                publisher.publish(translator.forget())
            translator = self._translator = EventTranslator(block_size)
        missing = 0
        while True:
            try:
                # The server waits briefly when there are no new ones.
                events = await server.read("/kv_cache_events", list[CacheEvent], method="POST")
                publisher.publish(translator.translate(events))
            except EngineUnavailableError:
                raise
            except EngineError as error:
                log.warning("%s; the server's blocks are forgotten", error)
                publisher.publish(translator.forget())
            if translator.gaps != missing:
                missing = translator.gaps
                log.warning(
                    "KV events of %s are missing; its blocks are forgotten. Let no other client "
                    "read /kv_cache_events, or increase event_buffer_max_size",
                    server.url,
                )
            await asyncio.sleep(_POLL_S)

    async def _answer_info(self, _: web.Request) -> web.Response:
        return self._answer(self._info)

    async def _answer_load(self, _: web.Request) -> web.Response:
        return self._answer(self._statistics.load())

    def _answer(self, value: object) -> web.Response:
        if self._info is None:
            return web.json_response({"error": self._problem}, status=503)
        return web.Response(body=json.encode(value), content_type="application/json")

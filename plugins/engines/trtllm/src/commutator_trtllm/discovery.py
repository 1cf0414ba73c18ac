"""What a running server is, asked of itself."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TypeVar

import aiohttp
import msgspec
from attrs import field, frozen

from commutator.engine.http import errors_told
from commutator.errors import EngineError, EngineUnavailableError
from commutator.types import EngineInfo
from commutator_trtllm.api import CacheEvent, IterationStats, ModelList, Version
from commutator_trtllm.bodies import COMPLETIONS
from commutator_trtllm.exchange import message_of, name_of
from commutator_trtllm.handover import handover_info
from commutator_trtllm.statistics import LatestStatistics

__all__ = ["Server"]

T = TypeVar("T")

# Statistics begin with the first step that the engine makes.
_ONE_TOKEN = {"prompt": [1], "max_tokens": 1, "temperature": 0.0, "detokenize": False}
_STATISTICS_TRIES = 20


@frozen(eq=False)
class Server:
    """One server as its sidecar asks it."""

    url: str
    session: aiohttp.ClientSession = field(repr=False)

    async def discover(
        self, statistics: LatestStatistics, *, max_model_len: int, hands_over: bool
    ) -> EngineInfo:
        """Generates one token, so that there are statistics; they are added to ``statistics``.

        Raises EngineUnavailableError while the server is not ready, and EngineError when it never
        will be.
        """
        await self._ask("GET", "/health")
        version = self._decode(await self._ask("GET", "/version"), Version)
        models = self._decode(await self._ask("GET", "/v1/models"), ModelList)
        if not models.data:
            raise EngineError(f"{name_of(self.url)} serves no model")
        model = models.data[0].id
        await self._ask("POST", COMPLETIONS, {"model": model, **_ONE_TOKEN})
        for _ in range(_STATISTICS_TRIES):
            statistics.add(await self.iteration_stats())
            if statistics.block_size and statistics.capacity_blocks:
                break
            await asyncio.sleep(0.1)
        else:
            raise EngineError(
                f"{self.url}/metrics tells nothing of the KV cache: start the server with "
                "`enable_iter_perf_stats: true`, and let nobody else read /metrics"
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
            handover=handover_info(model, version.version, size) if hands_over else None,
        )

    async def iteration_stats(self) -> list[IterationStats]:
        """What was not told before; the server waits a little for it."""
        return self._decode(await self._ask("GET", "/metrics"), list[IterationStats])

    async def kv_cache_events(self) -> list[CacheEvent]:
        """What was not told before; the server waits a little for it."""
        return self._decode(await self._ask("POST", "/kv_cache_events"), list[CacheEvent])

    def _decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.url} answers what is not understood: {error}") from error

    async def _ask(self, method: str, path: str, body: object = None) -> bytes:
        try:
            with errors_told(name_of(self.url)):
                async with self.session.request(method, self.url + path, json=body) as response:
                    answer = await response.read()
        except TimeoutError:
            raise EngineUnavailableError(f"{self.url}{path} gives no answer") from None
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise EngineUnavailableError(f"{self.url}{path} answers {response.status}")
        if response.status != HTTPStatus.OK:
            message = message_of(answer)
            raise EngineError(f"{self.url}{path} answers {response.status}: {message}")
        return answer

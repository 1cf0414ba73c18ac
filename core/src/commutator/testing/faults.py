"""Wraps any engine client so that it fails, by seed and by chance, in the ways that workers do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager

from attrs import frozen

from commutator.engine.contract import EngineClient, ForwardedAnswer, TokenStream
from commutator.errors import EngineError, EngineOverloadedError, EngineUnavailableError
from commutator.types import EngineInfo, EngineLoad, GenerateRequest, TokenDelta

__all__ = ["Faults", "FaultyClient"]


@frozen
class Faults:
    """Chances from 0 to 1, each drawn anew for every call or delta."""

    refuse_start: float = 0.0
    overloaded: float = 0.0
    lose_connection: float = 0.0
    """Before each delta: the stream ends with EngineUnavailableError."""
    fail: float = 0.0
    """Before each delta: the engine fails this request."""
    end_early: float = 0.0
    """Before each delta: the stream ends without a finish reason."""
    delay: float = 0.0
    delay_s: float = 0.05


class FaultyClient(EngineClient):
    """``inner`` with faults. Everything that does not fail is passed on as it is."""

    def __init__(self, inner: EngineClient, faults: Faults, seed: int) -> None:
        self._inner = inner
        self._faults = faults
        self._rng = random.Random(seed)
        self.injected: list[str] = []
        """The names of the faults that happened, in order."""

    def _hit(self, name: str) -> bool:
        chance: float = getattr(self._faults, name)
        hit = self._rng.random() < chance
        if hit:
            self.injected.append(name)
        return hit

    async def start(self) -> EngineInfo:
        if self._hit("refuse_start"):
            raise EngineUnavailableError("injected: connection refused")
        return await self._inner.start()

    def generate(self, request: GenerateRequest) -> TokenStream:
        return _FaultyStream(self._inner.generate(request), self)

    def forward(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[ForwardedAnswer]:
        return self._inner.forward(path, body, headers)

    async def load(self) -> EngineLoad:
        return await self._inner.load()

    async def drain(self) -> None:
        await self._inner.drain()

    async def close(self) -> None:
        await self._inner.close()

    async def maybe_fail(self) -> None:
        """Draw every fault of a stream once. Raises what the fault raises."""
        if self._hit("delay"):
            await asyncio.sleep(self._faults.delay_s)
        if self._hit("overloaded"):
            raise EngineOverloadedError("injected: full")
        if self._hit("lose_connection"):
            raise EngineUnavailableError("injected: connection lost")
        if self._hit("fail"):
            raise EngineError("injected: engine failure")
        if self._hit("end_early"):
            raise StopAsyncIteration


class _FaultyStream:
    def __init__(self, inner: TokenStream, client: FaultyClient) -> None:
        self._inner = inner
        self._client = client
        self._over = False

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._over:
            raise StopAsyncIteration
        try:
            await self._client.maybe_fail()
        except Exception:
            self._over = True
            await self._inner.aclose()
            raise
        return await self._inner.__anext__()

    async def aclose(self) -> None:
        self._over = True
        await self._inner.aclose()

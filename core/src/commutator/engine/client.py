"""The client of the token API: every request to a worker shares one connection."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from commutator.engine.contract import EngineClient
from commutator.engine.handover.statistics import HandoverStatistics
from commutator.engine.stream import DeltaStream
from commutator.engine.wire import PROTOCOL, FrameProtocol, pack_request, unpack_delta
from commutator.errors import (
    EngineError,
    EngineHandoverError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestError,
)
from commutator.types import EngineInfo, EngineLoad, FinishReason, GenerateRequest, TokenDelta

__all__ = ["TokenApiClient"]

log = logging.getLogger(__name__)


class TokenApiClient(EngineClient):
    """Talks to a ``TokenApiServer`` at "host:port"."""

    def __init__(self, address: str, *, answer_timeout_s: float = 5.0) -> None:
        self.address = address
        self._answer_timeout_s = answer_timeout_s
        self._connection: FrameProtocol | None = None
        self._info: asyncio.Future[EngineInfo] | None = None
        self._streams: dict[int, DeltaStream] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)

    async def start(self) -> EngineInfo:
        if self._connection is not None and self._info is not None:
            return await self._info
        loop = asyncio.get_running_loop()
        host, _, port = self.address.rpartition(":")
        info: asyncio.Future[EngineInfo] = loop.create_future()
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: FrameProtocol(self._on_frame, self._on_lost), host, int(port)
                )
                self._info = info
                self._connection = connection
                connection.send(["hello", PROTOCOL])
                return await asyncio.shield(info)
        except (OSError, TimeoutError) as error:
            info.cancel()
            self._drop()
            what = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise EngineUnavailableError(f"worker at {self.address}: {what}") from error

    def generate(self, request: GenerateRequest) -> DeltaStream:
        key = next(self._numbers)
        connection = self._connection

        def abort() -> None:
            if self._streams.pop(key, None) is not None and connection is not None:
                connection.send(["abort", key])

        stream = DeltaStream(abort)
        if connection is None:
            stream.fail(EngineUnavailableError(f"worker at {self.address}: not connected"))
            return stream
        self._streams[key] = stream
        connection.send(["generate", key, pack_request(request)])
        return stream

    async def load(self) -> EngineLoad:
        return msgspec.convert(await self._ask("load"), EngineLoad)

    async def drain(self) -> None:
        await self._ask("drain")

    async def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request needs."""
        await self._ask("reset_prefix_cache")

    @property
    def admin_address(self) -> str | None:
        return self.address

    async def kv_admin(
        self, what: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float = 5.0
    ) -> Any:
        return await self._ask("kv", what, dict(arguments or {}), timeout_s=timeout_s)

    @property
    def connected(self) -> bool:
        """Whether the connection is up, as far as is known."""
        return self._connection is not None

    async def handover(
        self, what: str, arguments: Mapping[str, Any], *, timeout_s: float = 5.0
    ) -> Any:
        """Ask about blocks that are handed over; see ``handover.pull_words``.

        Raises EngineError when the engine hands nothing over, EngineUnavailableError when it does
        not answer.
        """
        return await self._ask("handover", what, dict(arguments), timeout_s=timeout_s)

    async def handover_statistics(self, *, timeout_s: float = 5.0) -> HandoverStatistics:
        answer = await self.handover("statistics", {}, timeout_s=timeout_s)
        try:
            return msgspec.convert(answer, HandoverStatistics)
        except msgspec.ValidationError as error:
            raise EngineError(f"worker at {self.address}: {error}") from error

    async def close(self) -> None:
        for key in list(self._streams):
            if (stream := self._streams.get(key)) is not None:
                await stream.aclose()
        self._drop()

    async def _ask(self, *question: Any, timeout_s: float | None = None) -> Any:
        limit_s = self._answer_timeout_s if timeout_s is None else timeout_s
        if self._connection is None:
            await self.start()
        assert self._connection is not None
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        self._connection.send(["ask", number, *question])
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise EngineUnavailableError(
                f"worker at {self.address}: no answer within {limit_s:g} s"
            ) from None
        finally:
            self._questions.pop(number, None)

    def _drop(self) -> None:
        connection, self._connection, self._info = self._connection, None, None
        if connection is not None:
            connection.close()

    def _on_frame(self, frame: list[Any]) -> None:
        match frame:
            case ["deltas", deltas]:
                for key, token_ids, extras in deltas:
                    self._on_delta(key, unpack_delta(token_ids, extras))
            case ["refused", key, reason, kind]:
                if (stream := self._streams.pop(key, None)) is not None:
                    stream.fail(_refusal(str(reason), str(kind)))
            case ["answer", number, value]:
                if (answer := self._questions.get(number)) is not None and not answer.done():
                    answer.set_result(value)
            case ["failed", number, reason]:
                if (answer := self._questions.get(number)) is not None and not answer.done():
                    answer.set_exception(EngineError(str(reason)))
            case ["info", info] if self._info is not None and not self._info.done():
                self._info.set_result(msgspec.convert(info, EngineInfo))
            case _:
                log.warning("worker at %s sent an unknown frame %r", self.address, frame[0])

    def _on_delta(self, key: int, delta: TokenDelta) -> None:
        stream = self._streams.get(key)
        if stream is None:
            return  # aborted meanwhile
        if delta.finish_reason is not None:
            del self._streams[key]
            if delta.finish_reason is FinishReason.ERROR:
                kind = EngineHandoverError if delta.handover_failed else EngineError
                stream.fail(kind(delta.error or "the engine failed the request"))
                return
        stream.feed(delta)

    def _on_lost(self, reason: str) -> None:
        error = EngineUnavailableError(f"worker at {self.address}: connection lost ({reason})")
        self._connection = None
        if self._info is not None and not self._info.done():
            self._info.set_exception(error)
        self._info = None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        questions, self._questions = self._questions, {}
        for question in questions.values():
            if not question.done():
                question.set_exception(error)


def _refusal(reason: str, kind: str) -> Exception:
    if kind == "request":
        return RequestError(reason)
    return EngineOverloadedError(reason) if kind == "overloaded" else EngineError(reason)

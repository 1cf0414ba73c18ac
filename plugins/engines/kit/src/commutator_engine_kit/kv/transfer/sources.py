"""A reader's connections to other workers' exporters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from attrs import define, field

from commutator.backoff import Backoff
from commutator.errors import EngineError, EngineHandoverError, EngineUnavailableError
from commutator.frames import FrameProtocol, Questions, kind_of
from commutator.trust import ClientGate, Right, RunSecret, TlsError, connect, host_and_port
from commutator_engine_kit.kv.transfer.protocol import (
    SERVICE,
    ExportedMemory,
    LentBlocks,
    LookupRequest,
    ReleaseRequest,
)

log = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_CONNECT_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


class Connection:
    """A connection to one exporter, at "host:port". ``start`` connects it, again after a loss.

    The exporter must belong to the run of ``secret``, by default that of this process.
    """

    def __init__(self, address: str, *, secret: RunSecret | None = None) -> None:
        self.address = address
        self._gate = ClientGate(SERVICE, secret, expects=Right.SERVE_WORKER)
        self._frames: FrameProtocol | None = None
        self._questions = Questions()

    @property
    def connected(self) -> bool:
        """Whether the connection is up; a loss may be noticed late."""
        return self._frames is not None

    async def start(self) -> None:
        """Connect, unless it is connected. Raises EngineUnavailableError."""
        if self._frames is not None:
            return
        frames = FrameProtocol(
            self._on_frame, lambda reason: self._on_lost(frames, reason), self._gate
        )
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                transport = await connect(lambda: frames, *host_and_port(self.address))
                await frames.proven()
        except (OSError, ValueError, TimeoutError, TlsError) as error:
            frames.close()
            what = "no answer" if isinstance(error, TimeoutError) else str(error)
            raise self._unavailable(what) from error
        except asyncio.CancelledError:
            frames.close()  # nobody else knows of it
            raise
        if transport.is_closing():
            raise self._unavailable("connection lost at once")
        self._frames = frames

    async def ask(self, what: str, arguments: Any, *, timeout_s: float) -> Any:
        """Ask a question and return the answer. Call ``start`` before.

        Raises EngineUnavailableError without an answer, EngineHandoverError if it is a refusal.
        """
        try:
            return await self._questions.ask(partial(self._send, what, arguments), timeout_s)
        except TimeoutError:
            raise self._unavailable(f"no answer within {timeout_s:g} s") from None

    def tell(self, what: str, arguments: Any) -> None:
        """Ask without waiting for the answer. Does nothing when it is not connected."""
        if self._frames is not None:
            self._send(what, arguments, next(self._questions.numbers))

    async def close(self) -> None:
        """Disconnect, once everything is sent."""
        if self._frames is not None:
            self._frames.close()
            self._on_lost(self._frames, "closed")

    def _send(self, what: str, arguments: Any, number: int) -> None:
        if self._frames is None:
            raise self._unavailable("not connected")
        self._frames.send(["ask", number, what, arguments])

    def _on_frame(self, frame: list[Any]) -> None:
        match frame:
            case ["answer", int(number), value]:
                self._questions.answer(number, value)
            case ["failed", int(number), value]:
                self._questions.answer(number, EngineHandoverError(str(value)))
            case _:
                log.warning("exporter at %s: unknown frame %s", self.address, kind_of(frame))

    def _on_lost(self, frames: FrameProtocol, reason: str) -> None:
        if self._frames is not frames:
            return
        self._frames = None
        self._questions.fail(self._unavailable(f"connection lost ({reason})"))

    def _unavailable(self, what: str) -> EngineUnavailableError:
        return EngineUnavailableError(f"exporter at {self.address}: {what}")


@define(eq=False)
class _Source:
    connection: Connection
    memory: ExportedMemory | None = None
    greeted: bool = False
    """Whether ``memory`` was asked for on the present connection: a later one may be to another
    process."""
    connecting: asyncio.Lock = field(factory=asyncio.Lock)
    users: int = 0
    """Those who use the connection, or wait until they can."""
    dropped: bool = False
    """Whether ``Sources`` no longer has it, so that nobody would close a further connection."""
    silences: int = 0
    """Consecutive look-ups without an answer."""
    backoff: Backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    open_until_s: float = 0.0
    """The circuit breaker: no look-up is sent there before this time."""

    async def connect(self) -> None:
        """Connect if necessary. Only with ``connecting`` held. Raises EngineUnavailableError."""
        if not self.connection.connected and not self.dropped:
            self.greeted = False
            await self.connection.start()
        if self.dropped:
            await self.connection.close()
            what = "its connection was closed, because it is no longer in use"
            raise EngineUnavailableError(f"exporter at {self.connection.address}: {what}")

    async def drop(self) -> None:
        """Disconnect for good."""
        self.dropped = True
        await self.connection.close()

    def answered(self) -> None:
        self.silences, self.backoff = 0, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    def missed(self, max_silences: int) -> None:
        self.silences += 1
        if self.silences >= max_silences:
            self.backoff, pause_s = self.backoff.after_failure(0.0)
            self.open_until_s = time.monotonic() + pause_s


class Sources:
    """One connection for each exporter, made when needed. For use in one event loop."""

    def __init__(
        self,
        connect: Callable[[str], Connection] = Connection,
        *,
        forget: Callable[[ExportedMemory], None] = lambda _: None,
        hello_timeout_s: float = 30.0,
        max_silences: int = 2,
    ) -> None:
        """``forget`` is called with the memory of each process that has ended.

        After ``max_silences`` consecutive look-ups without an answer, an exporter gets none for
        1 s, and for twice as long after each further miss, up to 30 s.
        """
        self._connect = connect
        self._forget = forget
        self._hello_timeout_s = hello_timeout_s
        self._max_silences = max_silences
        self._sources: dict[str, _Source] = {}

    async def ask(
        self, address: str, what: str, arguments: Any, answer: type[AnswerT], *, timeout_s: float
    ) -> AnswerT:
        """Ask an exporter; connect to it if necessary.

        Raises EngineError without an answer, for a refusal, and for one of another type.
        """
        with self._used(address) as source:
            async with source.connecting:
                await source.connect()
            said = await source.connection.ask(what, arguments, timeout_s=timeout_s)
        return _as(answer, address, said)

    async def memory(self, address: str) -> ExportedMemory:
        """The arena at this address; asks once for each connection. Raises EngineError."""
        with self._used(address) as source:
            async with source.connecting:
                await source.connect()
                if source.memory is not None and source.greeted:
                    return source.memory
                said = await source.connection.ask("hello", {}, timeout_s=self._hello_timeout_s)
                found = _as(ExportedMemory, address, said)
                if source.memory is not None and source.memory != found:
                    self._forget(source.memory)
                source.memory, source.greeted = found, True
        await self._forget_lost()
        return found

    async def look_up(
        self,
        addresses: Collection[str],
        request: LookupRequest,
        timeout_s: float,
        keep: Collection[str] = (),
    ) -> list[tuple[str, LentBlocks]]:
        """The blocks that exporters lend, for each that answers in time, the most blocks first.

        Closes the connections to all other exporters, but for those in ``keep``. Never raises
        EngineError.
        """
        for address in self._sources.keys() - {*addresses, *keep}:
            await self._sources.pop(address).drop()
        now_s = time.monotonic()
        asked = [each for each in addresses if self._source(each).open_until_s <= now_s]
        answers = await asyncio.gather(*(self._look_up(a, request, timeout_s) for a in asked))
        found = [(a, lent) for a, lent in zip(asked, answers, strict=True) if lent is not None]
        return sorted(found, key=lambda answer: -len(answer[1].blocks))

    def release(self, address: str, request: ReleaseRequest) -> None:
        """Release blocks. If the message is lost, their lease lapses."""
        if (source := self._sources.get(address)) is not None:
            source.connection.tell("release", request)

    async def close(self) -> None:
        """Disconnect from all exporters."""
        sources, self._sources = self._sources, {}
        for source in sources.values():
            await source.drop()

    async def _look_up(
        self, address: str, request: LookupRequest, timeout_s: float
    ) -> LentBlocks | None:
        source = self._source(address)
        try:
            async with asyncio.timeout(timeout_s):
                lent = await self.ask(address, "look_up", request, LentBlocks, timeout_s=timeout_s)
        except (EngineError, TimeoutError) as error:
            log.debug("look-up at %s failed: %s", address, error)
            source.missed(self._max_silences)
            # It may lend the blocks yet, in an answer that comes too late.
            self.release(address, ReleaseRequest(request.id))
            return None
        source.answered()
        return lent

    async def _forget_lost(self) -> None:
        """Drop the sources whose connection is lost: workers come and go."""
        for address, source in list(self._sources.items()):
            idle = not source.connection.connected and not source.users
            # While another connection was closed, this source may have been replaced.
            if source.memory is not None and idle and self._sources.get(address) is source:
                del self._sources[address]
                self._forget(source.memory)
                await source.drop()

    @contextmanager
    def _used(self, address: str) -> Iterator[_Source]:
        source = self._source(address)
        source.users += 1
        try:
            yield source
        finally:
            source.users -= 1

    def _source(self, address: str) -> _Source:
        source = self._sources.get(address)
        if source is None:
            source = self._sources[address] = _Source(self._connect(address))
        return source


def _as(kind: type[AnswerT], address: str, answer: Any) -> AnswerT:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise EngineHandoverError(
            f"exporter at {address}: no valid {kind.__name__}: {error}"
        ) from error

"""The prefix index of front doors of other hosts, by the hub (``registry.index_exchange``)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

from commutator.errors import RegistryError
from commutator.frames import FrameProtocol, kind_of
from commutator.registry.hub import Hub, connections
from commutator.registry.index_exchange import SERVICE
from commutator.routing.prefix_index.snapshot import IndexSharing

log = logging.getLogger(__name__)

T = TypeVar("T")
_Frames = asyncio.Queue[list[Any] | None]
"""From the hub; None when the connection has ended."""
_DOOR = "a front door of another host"

_MOST_BEGINNERS = 4
"""At a time; one that asked before them gets no further part."""
_SILENCE_S = 2.0


class IndexExchangeClient:
    """Takes the index of a front door of another host at the start, and offers ours afterwards."""

    def __init__(self, hub: Hub, sharing: IndexSharing, silence_s: float = _SILENCE_S) -> None:
        """A door that sends nothing for ``silence_s`` seconds is given up."""
        self._hub = hub
        self._sharing = sharing
        self._silence_s = silence_s

    async def start_warm(self) -> None:
        """Take the first complete index that a door offers; before any worker is added.

        Never fails: without an answer, the index begins with what the workers can replay.
        """
        got: _Frames = asyncio.Queue()
        try:
            async with asyncio.timeout(self._silence_s):
                connection = await self._hub.connect(got.put_nowait, lambda: got.put_nowait(None))
        except (RegistryError, TimeoutError) as error:
            log.info("no front door of another host was asked: %s", str(error) or "no hub")
            return
        try:
            while connection.transport is not None:
                connection.send([SERVICE, "ask"])
                try:
                    first = await self._receive(got)
                except OSError as error:
                    log.warning("%s sent no prefix index: %s", _DOOR, str(error) or "no answer")
                    continue
                if first is None:
                    return
                async with aclosing(self._parts(first, connection, got)) as parts:
                    if await self._sharing.take(_DOOR, parts):
                        return
        finally:
            connection.close()

    async def _parts(
        self, first: list[Any], connection: FrameProtocol, got: _Frames
    ) -> AsyncGenerator[Any, None]:
        """Raises OSError and EOFError before the end."""
        part: list[Any] | None = first
        while part is not None:
            yield part
            connection.send([SERVICE, "next"])
            part = await self._receive(got)
        raise EOFError("the connection to the hub was lost")

    async def _receive(self, got: _Frames) -> list[Any] | None:
        """The next part; None when there is nobody to ask.

        Raises OSError when the door that was asked says nothing, or was lost.
        """
        async with asyncio.timeout(self._silence_s):
            while (frame := await got.get()) is not None:
                match frame:
                    case [_, "part", list(part)]:
                        return part
                    case [_, "none"]:
                        return None
                    case [_, "lost"]:
                        raise OSError("it went away")
                    case _:
                        log.warning("the hub sent an unknown frame %s", kind_of(frame))
        return None

    async def run(self) -> None:
        """Answer front doors of other hosts until cancelled; once every worker has been added."""
        answers = _Answers(self._sharing)
        what = "the prefix index is not offered"
        found = connections(self._hub.connect, answers.on_frame, what, logging.DEBUG)
        async with aclosing(found):
            async for connection, lost in found:
                answers.begin(connection)
                await lost.wait()


class _Answers:
    """What beginners get on a connection to the hub: each a part when it asks for the next."""

    def __init__(self, sharing: IndexSharing) -> None:
        self._connection: FrameProtocol | None = None
        self._sharing = sharing
        self._begun: dict[int, Iterator[list[Any]]] = {}

    def begin(self, connection: FrameProtocol) -> None:
        """Offer the index on a new connection."""
        self._connection = connection
        self._begun.clear()
        connection.send([SERVICE, "offer"])

    def on_frame(self, frame: list[Any]) -> None:
        match frame:
            case [_, "next", int(number)] if self._connection is not None:
                if (part := self._next(number)) is not None:
                    self._connection.send([SERVICE, "part", number, part])
            case _:
                log.warning("the hub sent an unknown frame %s", kind_of(frame))

    def _next(self, number: int) -> list[Any] | None:
        """None after the last part."""
        if number not in self._begun:
            while len(self._begun) >= _MOST_BEGINNERS:
                del self._begun[next(iter(self._begun))]
            self._begun[number] = self._sharing.parts()
        part = next(self._begun[number], None)
        if part is None:
            del self._begun[number]
        return part


async def warmed(
    batches: AsyncIterator[T], client: IndexExchangeClient | None
) -> AsyncGenerator[T, None]:
    """``batches``, of which the first also says where the hub is; an index is taken before it."""
    first = True
    async for batch in batches:
        if first and client is not None:
            await client.start_warm()
        first = False
        yield batch

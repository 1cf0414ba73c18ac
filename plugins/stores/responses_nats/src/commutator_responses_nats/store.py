"""Keeps responses in NATS JetStream: all front doors of all hosts share them.

One stream holds everything: for each response a message with its bytes, or, for what is too large,
the pieces under subjects of their own. Lifetime, bound and order of eviction are ours.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from msgspec.structs import replace as evolve
from nats.errors import Error
from nats.js.errors import NotFoundError

from commutator.contract.response_store import ResponseStore, StoredResponse
from commutator_responses.ledger import Key
from commutator_responses_nats.config import NatsStoreConfig
from commutator_responses_nats.records import body_of, name_of, record_of, stored_of
from commutator_responses_nats.session import Found, Session, opened

log = logging.getLogger(__name__)

T = TypeVar("T")

_USES = 100
"""That a response was used is written once in so many parts of its lifetime."""
_TRIES = 8
"""Of a change, where others change the same."""
_SWEEP_EVERY_S = 60.0


class NatsStore(ResponseStore):
    """Connects when it is first used, and anew after any failure."""

    def __init__(self, config: NatsStoreConfig, clock: Callable[[], float] = time.time) -> None:
        """``clock`` is one that all front doors agree on, to some seconds."""
        self.max_bytes = config.max_bytes
        self._config = config
        self._clock = clock
        self._session: Session | None = None
        self._opening: asyncio.Task[Session] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._warned = False

    async def put(self, stored: StoredResponse) -> None:
        await self._run(lambda session: self._put(session, stored))

    async def replace(self, stored: StoredResponse, maker: str) -> bool:
        return await self._run(lambda session: self._replace(session, stored, maker))

    async def history(
        self, owner: str, response_id: str, limit: int | None = None
    ) -> list[StoredResponse]:
        return await self._run(lambda session: self._history(session, owner, response_id, limit))

    async def delete(self, owner: str, response_id: str) -> bool:
        return await self._run(lambda session: self._delete(session, owner, response_id))

    async def close(self) -> None:
        for task in (self._opening, self._sweeping):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # ------------------------------------------------------------------- connections

    async def _run(self, work: Callable[[Session], Awaitable[T]]) -> T:
        """``work`` within the time that clients wait. Raises ``unavailable``."""
        session = self._session
        try:
            async with asyncio.timeout(self._config.timeout_s):
                session = await self._connected()
                return await work(session)
        except (Error, OSError, ValueError) as error:  # a TimeoutError is an OSError
            if not self._warned:
                said = str(error) or "no answer in time"
                log.warning("responses in NATS cannot be read or written: %s", said)
                self._warned = True
            if session is not None and session is self._session:
                self._session = None  # what it knows may not be so
                await session.close()
            raise self.unavailable() from error

    async def _connected(self) -> Session:
        if self._session is not None and self._session.is_open:
            return self._session
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> Session:
        """A session with the first server that has one. Raises Error, OSError."""
        last: Exception = Error("no server")
        for server in self._config.servers:
            try:
                session = await opened(self._config, server, self._clock)
            except Exception as error:  # noqa: BLE001 - whatever keys and files make it raise
                last = error
                continue
            self._session, self._warned = session, False
            log.info("responses are kept in NATS at %s", server)
            if self._sweeping is None:
                self._sweeping = asyncio.create_task(self._sweep())
            return session
        raise last if isinstance(last, Error | OSError) else Error(str(last))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            session = self._session
            if session is None or not session.is_open:
                continue
            try:
                async with asyncio.timeout(_SWEEP_EVERY_S):
                    await self._expire(session)
                    await session.sweep()
            except (Error, OSError, ValueError) as error:
                log.debug("responses in NATS: what is old stays for now: %s", error)

    # --------------------------------------------------------------------- responses

    async def _put(
        self, session: Session, stored: StoredResponse, expected: int | None = None
    ) -> bool:
        """False: its last message is not number ``expected``, and nothing was written."""
        name, size = name_of(stored.owner, stored.id), stored.size_bytes
        if size > self.max_bytes:
            await session.forget(name, session.known(name))
            return True
        await self._expire(session)
        key, known = (stored.owner, stored.id), session.known(name)
        session.ledger.forget(key)  # it does not give way to itself
        await self._forget(session, [*session.ledger.room_for(size)])
        body = body_of(stored)
        parts_of, parts = await session.store_parts(body)
        record = record_of(stored, self._clock(), parts_of, parts)
        if await session.write(name, record, b"" if parts_of else body, expected):
            return True
        if known is not None:
            session.ledger.put(key, known.size_bytes, known.used_s)
        return False

    async def _replace(self, session: Session, stored: StoredResponse, maker: str) -> bool:
        for _ in range(_TRIES):
            found = await self._find(session, stored.owner, stored.id)
            if found is None or found.record.maker != maker:
                return False
            if await self._put(session, stored, found.sequence):
                return True
        raise Error("others change the same response all the time")

    async def _history(
        self, session: Session, owner: str, response_id: str, limit: int | None
    ) -> list[StoredResponse]:
        found: list[tuple[Found, bytes]] = []
        wanted: str | None = response_id
        while wanted is not None and (limit is None or len(found) < limit):
            one = await self._find(session, owner, wanted)
            if one is None:
                break
            try:
                found.append((one, await session.body(one)))
            except NotFoundError:
                break  # it was replaced or forgotten this moment
            wanted = one.record.previous
        found.reverse()
        for one, _ in found:
            await self._use(session, one)
        return [stored_of(one.record, body) for one, body in found]

    async def _delete(self, session: Session, owner: str, response_id: str) -> bool:
        found = await self._find(session, owner, response_id)
        if found is None:
            return False
        await session.forget(name_of(owner, response_id), found.record)
        return True

    async def _find(self, session: Session, owner: str, response_id: str) -> Found | None:
        """What is kept, and not too old."""
        found = await session.find(name_of(owner, response_id))
        if found is None or found.record.used_s <= self._clock() - self._config.ttl_s:
            return None
        return found

    async def _use(self, session: Session, found: Found) -> None:
        now_s, record = self._clock(), found.record
        session.ledger.use((record.owner, record.id), now_s)
        if record.used_s <= now_s - self._config.ttl_s / _USES:
            name = name_of(record.owner, record.id)
            # Another one that has written it meanwhile has used it as well.
            await session.write(name, evolve(record, used_s=now_s), found.data, found.sequence)

    async def _expire(self, session: Session) -> None:
        await self._forget(session, [*session.ledger.expired(self._clock())])

    async def _forget(self, session: Session, keys: Iterable[Key]) -> None:
        for owner, response_id in keys:
            name = name_of(owner, response_id)
            await session.forget(name, session.known(name))

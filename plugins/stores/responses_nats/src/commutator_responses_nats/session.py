"""One connection to JetStream, and what it knows of all that is kept there.

All front doors follow the headers of the stream, so that each can say what has to give way.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress

from attrs import frozen
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, BadRequestError, NotFoundError

from commutator_nats.client import close, connected
from commutator_responses.ledger import Ledger
from commutator_responses_nats.config import NatsStoreConfig
from commutator_responses_nats.records import Record, split

log = logging.getLogger(__name__)

_STREAM_EXISTS = 10058
_WRONG_SEQUENCE = 10071
_PART_BYTES = 512 << 10
_ROOM_FOR_HEADERS = 16 << 10
_CATCH_UP_S = 3.0
_FORGOTTEN_S = 60.0
"""How long the word that a response is gone is kept for those who follow."""
_ORPHANED_S = 600.0
"""After which pieces are nobody's that no response has; one is written in seconds."""


@frozen
class Found:
    """A response's last message."""

    sequence: int
    record: Record
    data: bytes
    """What the message itself holds."""


@frozen
class _Known:
    sequence: int
    record: Record


class Session:
    """``opened`` makes it. A failure of any method leaves it in doubt: open another one."""

    def __init__(
        self,
        config: NatsStoreConfig,
        client: Client,
        clock: Callable[[], float],
        ended: asyncio.Event,
    ) -> None:
        self._client = client
        self._js: JetStreamContext = client.jetstream(timeout=config.timeout_s)
        self._clock = clock
        self._ended = ended
        self._stream = f"commutator_responses_{config.cluster}"
        self._subjects = f"commutator.{config.cluster}.responses"
        self._direct = config.copies == 1  # a copy may not have what was written a moment ago
        self._config = api.StreamConfig(
            name=self._stream,
            subjects=[f"{self._subjects}.>"],
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.NEW,
            # Front doors keep to max_bytes; this is what holds where many write at once.
            max_bytes=2 * config.max_bytes + (64 << 20),
            max_msgs_per_subject=1,
            num_replicas=config.copies,
            allow_direct=self._direct,
        )
        self._part_bytes = min(_PART_BYTES, client.max_payload - _ROOM_FOR_HEADERS)
        self._caught_up = asyncio.Event()
        self._known: dict[str, _Known] = {}
        """By name."""
        self._gone: dict[str, tuple[int, float]] = {}
        """By name: the number of the message that says so, and when it was seen."""
        self.ledger = Ledger(config.max_bytes, config.ttl_s)

    @property
    def is_open(self) -> bool:
        return not self._ended.is_set() and self._client.is_connected

    async def close(self) -> None:
        await close(self._client)

    async def begin(self) -> None:
        """Make the stream, or make it as it is configured now, and learn what is in it."""
        try:
            info = await self._js.add_stream(self._config)
        except BadRequestError as error:
            if error.err_code != _STREAM_EXISTS:
                raise
            info = await self._js.update_stream(self._config)
        await self._js.subscribe(
            f"{self._subjects}.of.*",
            stream=self._stream,
            cb=self._follow,
            ordered_consumer=True,
            config=api.ConsumerConfig(headers_only=True),
        )
        if info.state.messages:
            with suppress(TimeoutError):  # what it had may be gone meanwhile
                async with asyncio.timeout(_CATCH_UP_S):
                    await self._caught_up.wait()

    # ------------------------------------------------------------------ one response

    async def find(self, name: str) -> Found | None:
        """None: it is not kept."""
        try:
            found = await self._js.get_last_msg(
                self._stream, f"{self._subjects}.of.{name}", direct=self._direct
            )
        except NotFoundError:
            return None
        record = Record.read(found.headers)
        if record is None or found.seq is None:
            return None
        return Found(found.seq, record, found.data or b"")

    async def body(self, found: Found) -> bytes:
        """All of its bytes."""
        record = found.record
        if record.parts_of is None:
            return found.data
        pieces = await asyncio.gather(
            *(
                self._js.get_last_msg(
                    self._stream,
                    f"{self._subjects}.parts.{record.parts_of}.{number}",
                    direct=self._direct,
                )
                for number in range(record.parts)
            )
        )
        return b"".join(piece.data or b"" for piece in pieces)

    async def store_parts(self, body: bytes) -> tuple[str | None, int]:
        """Write what is too large for one message; where it is, and in how many pieces."""
        if len(body) <= self._part_bytes:
            return None, 0
        pieces = split(body, self._part_bytes)
        name = f"{int(self._clock())}-{secrets.token_hex(8)}"
        for number, piece in enumerate(pieces):
            await self._js.publish(f"{self._subjects}.parts.{name}.{number}", piece)
        return name, len(pieces)

    async def write(
        self, name: str, record: Record, data: bytes, expected: int | None = None
    ) -> bool:
        """False: its last message is not number ``expected`` any more, and nothing was written."""
        before = self._known.get(name)  # those who follow may know of the new one before us
        headers = record.headers
        if expected is not None:
            headers[api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE] = str(expected)
        try:
            done = await self._js.publish(f"{self._subjects}.of.{name}", data, headers=headers)
        except APIError as error:
            if error.err_code == _WRONG_SEQUENCE:
                return False
            raise
        self._apply(name, done.seq, record)
        if before is not None and before.record.parts_of != record.parts_of:
            await self._drop_parts(before.record)
        return True

    async def forget(self, name: str, record: Record | None) -> None:
        """It is kept no more; everybody who follows learns of it."""
        done = await self._js.publish(f"{self._subjects}.of.{name}", b"")
        self._apply(name, done.seq, None)
        if record is not None:
            await self._drop_parts(record)

    def known(self, name: str) -> Record | None:
        """What those who follow know of it."""
        known = self._known.get(name)
        return None if known is None else known.record

    async def _drop_parts(self, record: Record) -> None:
        if record.parts_of is not None:
            subject = f"{self._subjects}.parts.{record.parts_of}.*"
            await self._js.purge_stream(self._stream, subject=subject)

    # ------------------------------------------------------------------- everything

    async def _follow(self, message: Msg) -> None:
        try:
            record = Record.read(message.headers)
        except ValueError as error:
            log.warning("%s: %s is no response of ours: %s", self._stream, message.subject, error)
            record = None
        name = message.subject.rpartition(".")[2]
        self._apply(name, message.metadata.sequence.stream, record)
        if not message.metadata.num_pending:
            self._caught_up.set()

    def _apply(self, name: str, sequence: int, record: Record | None) -> None:
        """What message number ``sequence`` says; older ones say nothing any more."""
        known, gone = self._known.get(name), self._gone.get(name)
        if sequence <= max(known.sequence if known else 0, gone[0] if gone else 0):
            return
        self._gone.pop(name, None)
        if record is None:
            self._known.pop(name, None)
            self._gone[name] = sequence, self._clock()
            if known is not None:
                self.ledger.forget((known.record.owner, known.record.id))
        else:
            self._known[name] = _Known(sequence, record)
            self.ledger.put((record.owner, record.id), record.size_bytes, record.used_s)

    async def sweep(self) -> None:
        """Drop what nobody needs any more: old words of what is gone, and pieces of no response."""
        now_s = self._clock()
        for name, (sequence, since_s) in [*self._gone.items()]:
            if since_s <= now_s - _FORGOTTEN_S:
                subject = f"{self._subjects}.of.{name}"
                await self._js.purge_stream(self._stream, seq=sequence + 1, subject=subject)
                del self._gone[name]
        info = await self._js.stream_info(self._stream, f"{self._subjects}.parts.>")
        names = {subject.split(".")[-2] for subject in info.state.subjects or ()}
        names -= {known.record.parts_of for known in self._known.values() if known.record.parts_of}
        for name in names:
            if int(name.partition("-")[0]) <= now_s - _ORPHANED_S:
                subject = f"{self._subjects}.parts.{name}.*"
                await self._js.purge_stream(self._stream, subject=subject)


async def opened(config: NatsStoreConfig, server: str, clock: Callable[[], float]) -> Session:
    """A session that has begun. Raises whatever the library and the network raise."""
    ended = asyncio.Event()

    async def on_closed() -> None:
        ended.set()

    client = await connected(config, server, on_closed)
    session = Session(config, client, clock, ended)
    try:
        await session.begin()
    except BaseException:
        await session.close()
        raise
    return session

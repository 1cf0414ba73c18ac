"""The event bus over NATS' core subjects; nothing is stored there, and hosts answer replays."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from urllib.parse import quote

import msgspec
from nats.aio.msg import Msg

from commutator import EventSource
from commutator.contract.event_bus import (
    EventBus,
    EventChannel,
    EventOutlet,
    EventStream,
    KeptMessages,
    Message,
)
from commutator.errors import EngineUnavailableError
from commutator.kv_events import seal_message, unseal_message
from commutator_nats.config import NatsConfig
from commutator_nats.connection import Connection
from commutator_nats.framing import Frame, Incoming, Page, Reassembly, Request, head, page, split

log = logging.getLogger(__name__)

_SCHEME = "nats-subject:"
_OVERHEAD_BYTES = 512
"""Of a payload: the seal, and what a frame has beside its piece."""
_PAGE_BYTES = 256 * 1024
"""Of a replay's answer."""
_HEAD_AFTER_S = 0.2
"""Once a stream is silent for so long, its outlet says which message was the last."""
_MOST_QUEUED = 10_000
"""Messages that an outlet holds for a slow connection."""
_BURST = 32
_NONCE_BYTES = 16
_ASK_AGAIN_S = 0.5
"""A page without an answer is asked for again; another host may have to reconnect first."""
_NOBODY_PAUSE_S = 0.1
_NOBODY = "503"
"""The status by which a server says that nobody subscribes to a request's subject."""


class NatsEventBus(EventBus):
    """Makes outlets and channels on one connection."""

    def __init__(self, config: NatsConfig) -> None:
        self._config = config
        self._prefix = f"commutator.{config.cluster}"
        self._connection = Connection(config)
        if not config.encrypted and config.insecure:
            log.warning("insecure: KV events, which name prompts' tokens, go to NATS in plain text")
        if not config.authenticates:
            log.warning(
                "cluster.events shows NATS no token, nkey or certificate: everyone who reaches the "
                "servers can read which tokens are cached"
            )

    async def publish(self, stream: EventStream, kept: KeptMessages) -> EventOutlet:
        return _Outlet(self._connection, self._prefix, stream, kept)

    def subscribe(
        self, source: EventSource, on_malformed: Callable[[Exception], None]
    ) -> EventChannel:
        subject, hash_, instance = source.endpoint.removeprefix(_SCHEME).partition("#")
        if not source.endpoint.startswith(_SCHEME) or not hash_ or not source.replay_endpoint:
            raise ValueError(
                f"{source.endpoint} is no NATS subject: its host publishes on another event bus; "
                "give all hosts the same cluster.events"
            )
        replays = source.replay_endpoint.removeprefix(_SCHEME)
        most = self._config.max_waiting_messages
        inboxes = f"{self._prefix}.inbox"
        return _Channel(self._connection, subject, replays, inboxes, instance, on_malformed, most)

    async def close(self) -> None:
        await self._connection.close()


def _token(name: str) -> str:
    """``name`` as one token of a subject, for people to recognise."""
    return quote(name, safe="").replace(".", "%2E")


class _Outlet(EventOutlet):
    """Sends frames from a task of its own, and answers requests for pages."""

    def __init__(
        self, connection: Connection, prefix: str, stream: EventStream, kept: KeptMessages
    ) -> None:
        rank = f".{stream.rank}" if stream.rank else ""
        place = f"{_token(stream.model)}.{_token(stream.worker_id)}{rank}"
        self._subject = f"{prefix}.kv.{place}"
        self._replays = f"{prefix}.replay.{place}"
        self._instance = stream.instance
        self.source = EventSource(
            endpoint=f"{_SCHEME}{self._subject}#{self._instance}",
            replay_endpoint=f"{_SCHEME}{self._replays}",
        )
        self._connection = connection
        self._kept = kept
        self._queued: deque[Message] = deque(maxlen=_MOST_QUEUED)
        self._wake = asyncio.Event()
        self._owes_head = True
        self._subscription = connection.subscribe(self._replays, self._answer, self._on_up)
        self._sending: asyncio.Task[None] | None = asyncio.create_task(self._send())

    def send(self, sequence: int, body: bytes) -> None:
        self._queued.append((sequence, body))
        self._wake.set()

    async def close(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            self._connection.unsubscribe(self._subscription)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            while self._queued:
                await self._send_next()

    def _on_up(self) -> None:
        self._owes_head = True  # what was sent while there was no connection is missing
        self._wake.set()

    async def _send(self) -> None:
        while True:
            self._wake.clear()
            try:
                async with asyncio.timeout(_HEAD_AFTER_S if self._owes_head else None):
                    await self._wake.wait()
            except TimeoutError:
                self._owes_head = False
                await self._publish(head(self._instance, self._kept.end))
            while self._queued:
                self._owes_head = True
                await self._send_next()

    async def _send_next(self) -> None:
        sequence, body = self._queued.popleft()
        most = self._connection.max_payload - _OVERHEAD_BYTES
        for frame in split(self._instance, sequence, body, most):
            await self._publish(frame)

    async def _publish(self, frame: Frame) -> None:
        payload = seal_message(self._subject, _encoder.encode(frame))
        await self._connection.publish(self._subject, payload)

    async def _answer(self, msg: Msg) -> None:
        # The seal covers where the answer goes: a request that was seen cannot be sent again to
        # have events sent elsewhere.
        unsealed = unseal_message(f"{self._replays} {msg.reply}", msg.data)
        if unsealed is None or not msg.reply:
            return
        try:
            request = _requests.decode(unsealed)
        except msgspec.DecodeError as error:
            log.debug("%s: no request for a replay: %s", self._replays, error)
            return
        if request.instance != self._instance:
            return
        most = min(_PAGE_BYTES, self._connection.max_payload - _OVERHEAD_BYTES)
        answer = _encoder.encode(page(self._kept, request.first, request.offset, most))
        place = f"{msg.reply} {request.nonce.hex()}"
        await self._connection.publish(msg.reply, request.nonce + seal_message(place, answer))


class _Channel(EventChannel):
    """Holds what came until it is received."""

    def __init__(
        self,
        connection: Connection,
        subject: str,
        replays: str,
        inboxes: str,
        instance: str,
        on_malformed: Callable[[Exception], None],
        most: int,
    ) -> None:
        self._connection = connection
        self._name = subject
        self._replays = replays
        self._inboxes = inboxes
        self._instance = instance
        self._on_malformed = on_malformed
        self._most = most
        self._incoming = Incoming(instance)
        self._messages: deque[Message] = deque()
        self._arrived = asyncio.Event()
        self._missed = asyncio.Event()
        self._dropped = 0
        self._subject = connection.subscribe(subject, self._take, self._missed.set)

    async def receive(self) -> Sequence[Message]:
        while not self._messages:
            self._arrived.clear()
            await self._arrived.wait()
        burst = [self._messages.popleft() for _ in range(min(_BURST, len(self._messages)))]
        if self._dropped and not self._messages:
            log.warning("%s: %d messages came faster than they were read; they are asked for again",
                        self._name, self._dropped)  # fmt: skip
            self._dropped = 0
            self._missed.set()
        return burst

    async def missed(self) -> None:
        await self._missed.wait()
        self._missed.clear()

    async def replay(self, first: int, timeout_s: float) -> AsyncGenerator[Sequence[Message], None]:
        replay = Reassembly(first)
        requests = _Requests(self._connection, self._replays, self._inboxes)
        complete = False
        try:
            while not complete:
                answer = await requests.page(self._instance, replay, timeout_s)
                try:
                    messages = replay.feed(answer)
                except ValueError as error:
                    raise EngineUnavailableError(f"{self._replays}: {error}") from None
                complete = answer.complete
                if messages:
                    yield messages
        finally:
            requests.close()

    async def close(self) -> None:
        self._connection.unsubscribe(self._subject)

    async def _take(self, msg: Msg) -> None:
        if len(self._messages) >= self._most:
            self._dropped += 1
            return
        payload = unseal_message(self._name, msg.data)
        try:
            if payload is None:
                raise ValueError("not sealed with this run's secret")  # noqa: TRY301
            frame = _frames.decode(payload)
        except (msgspec.DecodeError, ValueError) as error:
            self._on_malformed(error)
            return
        message = self._incoming.feed(frame)
        if message is not None:
            self._messages.append(message)
            self._arrived.set()
        elif self._incoming.is_behind(frame):
            self._missed.set()


class _Requests:
    """Asks a worker's host for the pages of one replay, at an inbox of its own."""

    def __init__(self, connection: Connection, replays: str, inboxes: str) -> None:
        self._connection = connection
        self._replays = replays
        self._inbox = f"{inboxes}.{secrets.token_hex(_NONCE_BYTES)}"
        self._nonce = b""
        self._answered: asyncio.Future[bytes | None] | None = None
        self._up = asyncio.Event()
        self._subject = connection.subscribe(self._inbox, self._take, self._up.set)

    def close(self) -> None:
        self._connection.unsubscribe(self._subject)

    async def page(self, instance: str, replay: Reassembly, timeout_s: float) -> Page:
        """Ask until there is an answer. Raises EngineUnavailableError after ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
                while True:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_ASK_AGAIN_S):
                            answer = await self._ask(instance, replay)
                        if answer is not None:
                            return answer
                        await asyncio.sleep(_NOBODY_PAUSE_S)
        raise EngineUnavailableError(
            f"no answer to a request for missed events at {self._replays} for {timeout_s:g} s"
        )

    async def _ask(self, instance: str, replay: Reassembly) -> Page | None:
        """One request; None when nobody is there to answer, or not properly."""
        self._answered = asyncio.get_running_loop().create_future()
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        request = _encoder.encode(Request(instance, replay.first, replay.offset, self._nonce))
        sealed = seal_message(f"{self._replays} {self._inbox}", request)
        if not await self._connection.publish(self._replays, sealed, self._inbox):
            return None
        payload = await self._answered
        if payload is None:
            return None
        answer = unseal_message(f"{self._inbox} {self._nonce.hex()}", payload)
        try:
            return None if answer is None else _pages.decode(answer)
        except msgspec.DecodeError as error:
            log.debug("%s: no page of a replay: %s", self._replays, error)
            return None

    async def _take(self, msg: Msg) -> None:
        if self._answered is None or self._answered.done():
            return
        if msg.headers and msg.headers.get("Status") == _NOBODY:
            self._answered.set_result(None)
        elif msg.data[:_NONCE_BYTES] == self._nonce:
            self._answered.set_result(msg.data[_NONCE_BYTES:])


_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)
_requests = msgspec.msgpack.Decoder(Request)
_pages = msgspec.msgpack.Decoder(Page)

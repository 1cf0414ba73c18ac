"""One connection to NATS for all streams of a process, made anew whenever it ends.

Subscribers must know when a subscription is in force again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from attrs import define, field
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error

from commutator_nats.client import CONNECT_TIMEOUT_S, close, connected
from commutator_nats.config import NatsConfig

log = logging.getLogger(__name__)

_PAUSE_S = 0.2
"""Before another server is tried."""


@define(eq=False)
class Subject:
    """A subscription that outlives connections."""

    name: str
    on_message: Callable[[Msg], Awaitable[None]]
    on_up: Callable[[], None]
    """Called when the subscription is in force, on each connection."""
    active: Subscription | None = field(default=None, init=False)
    """On the present connection."""


class Connection:
    """Connects when it is first used. Used from one event loop."""

    def __init__(self, config: NatsConfig) -> None:
        self._config = config
        self._servers = itertools.cycle(config.servers)
        self._client: Client | None = None
        self._subjects: dict[Subject, None] = {}
        self._gone: list[Subscription] = []
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @property
    def max_payload(self) -> int:
        """What the servers carry at once, in bytes; their usual default without a connection."""
        return 1024 * 1024 if self._client is None else self._client.max_payload

    def subscribe(
        self, name: str, on_message: Callable[[Msg], Awaitable[None]], on_up: Callable[[], None]
    ) -> Subject:
        """Subscribe on this connection and every later one."""
        subject = Subject(name, on_message, on_up)
        self._subjects[subject] = None
        self._changed.set()
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return subject

    def unsubscribe(self, subject: Subject) -> None:
        """``on_message`` is not called afterwards but for what has arrived."""
        del self._subjects[subject]
        if subject.active is not None:
            self._gone.append(subject.active)
            self._changed.set()

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """False: there is no connection, and nothing was sent."""
        client = self._client
        if client is None:
            return False
        try:
            await client.publish(subject, payload, reply)
        except Error as error:
            log.debug("NATS: a message was not sent: %s", error)
            return False
        return True

    async def close(self) -> None:
        """Send what waits, and disconnect. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run(self) -> None:
        warned = False
        while True:
            server = next(self._servers)
            ended = asyncio.Event()
            try:
                client = await connected(self._config, server, partial(self._ended, ended))
            except Exception as error:  # noqa: BLE001 - whatever keys and files make it raise
                level = logging.DEBUG if warned else logging.WARNING
                log.log(level, "NATS at %s cannot be used: %s", server, str(error) or "no answer")
                warned = True
                await asyncio.sleep(_PAUSE_S)
                continue
            log.info("KV events go over NATS at %s", server)
            try:
                await self._serve(client, ended)
            except (Error, OSError, TimeoutError) as error:
                log.debug("NATS at %s: %s", server, error)
            finally:
                self._client = None
                for subject in self._subjects:
                    subject.active = None
                self._gone.clear()
                await close(client)
            log.warning("the connection to NATS at %s was lost; messages may be missing", server)
            warned = False

    async def _ended(self, ended: asyncio.Event) -> None:
        ended.set()
        self._changed.set()

    async def _serve(self, client: Client, ended: asyncio.Event) -> None:
        """Keep the connection's subscriptions current until it ends."""
        self._client = client
        while not ended.is_set():
            self._changed.clear()
            gone, self._gone = self._gone, []
            for subscription in gone:
                with suppress(Error):
                    await subscription.unsubscribe()
            new = [subject for subject in self._subjects if subject.active is None]
            for subject in new:
                subject.active = await client.subscribe(subject.name, cb=subject.on_message)
            if new:
                await client.flush(timeout=CONNECT_TIMEOUT_S)  # the servers know of them
            for subject in new:
                if subject in self._subjects:
                    subject.on_up()
                elif subject.active is not None:  # it was given up meanwhile
                    self._gone.append(subject.active)
                    self._changed.set()
            await self._changed.wait()

"""One connection to NATS for all streams of a process, made anew whenever it ends.

The client's own reconnecting is off: it gives up for good after some errors that servers send, and
subscribers must know when a subscription is in force again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from attrs import define, field
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error

from commutator_nats.config import NatsConfig

__all__ = ["Connection", "Subject"]

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 2
_PAUSE_S = 0.2
"""Before another server is tried."""
_PING_EVERY_S = 2
"""A server that leaves two pings unanswered is left."""
_FLUSH_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0


@define(eq=False)
class Subject:
    """A subscription that outlives connections."""

    name: str
    on_message: Callable[[Msg], Awaitable[None]]
    on_up: Callable[[], None]
    """Called when the subscription is in force, on each connection."""
    active: Subscription | None = field(default=None, init=False)
    """On the present connection."""


class _Client(Client):
    """Refuses to go on without TLS where it was asked for; the library would, with the token."""

    needs_tls = False

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self.needs_tls and not info.get("tls_required"):
            raise Error("the server does not require TLS; set `tls` in its configuration")
        await super()._process_info(info, initial_connection)


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
                client = await self._connect(server, ended)
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
                await _close(client)
            log.warning("the connection to NATS at %s was lost; messages may be missing", server)
            warned = False

    async def _connect(self, server: str, ended: asyncio.Event) -> Client:
        config, client = self._config, _Client()
        client.needs_tls = config.encrypted

        async def closed() -> None:
            ended.set()
            self._changed.set()

        async def failed(error: Exception) -> None:
            log.debug("NATS at %s: %s", server, error)

        options: dict[str, Any] = {"tls": _context(config)} if config.encrypted else {}
        if config.token is not None:
            options["token"] = config.token.reveal()
        if config.nkey_seed is not None:
            options["nkeys_seed_str"] = config.nkey_seed.reveal()
        try:
            async with asyncio.timeout(2 * _CONNECT_TIMEOUT_S):
                await client.connect(
                    servers=server,
                    name="commutator",
                    error_cb=failed,
                    closed_cb=closed,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    ping_interval=_PING_EVERY_S,
                    max_outstanding_pings=2,
                    flush_timeout=_FLUSH_TIMEOUT_S,
                    **options,
                )
        except BaseException:
            await _close(client)
            raise
        return client

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
                await client.flush(timeout=_CONNECT_TIMEOUT_S)  # the servers know of them
            for subject in new:
                if subject in self._subjects:
                    subject.on_up()
                elif subject.active is not None:  # it was given up meanwhile
                    self._gone.append(subject.active)
                    self._changed.set()
            await self._changed.wait()


async def _close(client: Client) -> None:
    with suppress(Error, OSError, TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await client.close()


def _context(config: NatsConfig) -> ssl.SSLContext:
    tls = config.tls
    assert tls is not None
    context = ssl.create_default_context(cafile=tls.ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.cert_file is not None:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    return context

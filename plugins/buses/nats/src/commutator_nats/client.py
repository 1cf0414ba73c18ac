"""One connection to one NATS server, once.

The client's own reconnecting is off: it gives up for good after some errors that servers send.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from nats.aio.client import Client
from nats.errors import Error

from commutator_nats.config import NatsServers

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2
"""For the server's first word, and for each answer to a subscription."""
_PING_EVERY_S = 2
"""A server that leaves two pings unanswered is left."""
_FLUSH_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0


class _Client(Client):
    """Refuses to go on without TLS where it was asked for; the library would, with the token."""

    needs_tls = False

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self.needs_tls and not info.get("tls_required"):
            raise Error("the server does not require TLS; set `tls` in its configuration")
        await super()._process_info(info, initial_connection)


async def connected(
    config: NatsServers, server: str, on_closed: Callable[[], Awaitable[None]]
) -> Client:
    """A connection to ``server``; ``on_closed`` is called when it ends, for whatever reason.

    Raises whatever keys, files, the network and the server make the library raise.
    """
    client = _Client()
    client.needs_tls = config.encrypted

    async def failed(error: Exception) -> None:
        log.debug("NATS at %s: %s", server, error)

    options: dict[str, Any] = {"tls": _context(config)} if config.encrypted else {}
    if config.token is not None:
        options["token"] = config.token.reveal()
    if config.nkey_seed is not None:
        options["nkeys_seed_str"] = config.nkey_seed.reveal()
    try:
        async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
            await client.connect(
                servers=server,
                name="commutator",
                error_cb=failed,
                closed_cb=on_closed,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=CONNECT_TIMEOUT_S,
                ping_interval=_PING_EVERY_S,
                max_outstanding_pings=2,
                flush_timeout=_FLUSH_TIMEOUT_S,
                **options,
            )
    except BaseException:
        await close(client)
        raise
    return client


async def close(client: Client) -> None:
    """Disconnect within seconds, whatever the server does."""
    with suppress(Error, OSError, TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await client.close()


def _context(config: NatsServers) -> ssl.SSLContext:
    tls = config.tls
    assert tls is not None
    context = ssl.create_default_context(cafile=tls.ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.cert_file is not None:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    return context

"""Opens and accepts connections: plain on the loopback interface, by mutual TLS between hosts."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from commutator.trust.gate import address_text
from commutator.trust.network import (
    Certificates,
    Network,
    TlsFiles,
    is_loopback,
    network_of_this_process,
)
from commutator.trust.refusals import note_refusal, will_refuse

log = logging.getLogger("commutator.trust")

_HANDSHAKE_S = 5.0
_MAX_PENDING = 128
"""TLS handshakes in progress; further connections are refused."""
_ACCEPT_PAUSE_S = 0.1
_VANISHED_MS = 5000
"""A host that acknowledges nothing for this long is gone: it sent no RST."""
_TCP_INFO = struct.Struct("=24xI28xI")
"""Of ``tcp_info``: segments without an acknowledgement, ms since the last one came."""
_PROBE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of "host:port"; a host in brackets is an IPv6 address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def in_url(host: str) -> str:
    """A host as it stands before ":port": an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@lru_cache(maxsize=4)
def _certificates(files: TlsFiles) -> Certificates:
    return Certificates(files)


def certificates_of(network: Network) -> Certificates | None:
    """The certificates of a network; None where it has none. Raises TlsError."""
    return None if network.tls is None else _certificates(network.tls)


def secured(host: str) -> Certificates | None:
    """The certificates for connections at ``host``; None: without TLS. Raises TlsError."""
    network = network_of_this_process()
    if network is None or network.tls is None or is_loopback(host):
        return None
    return _certificates(network.tls)


async def connect(
    protocol: Callable[[], asyncio.Protocol], host: str, port: int
) -> asyncio.BaseTransport:
    """Connect, as ``loop.create_connection`` does. Raises OSError, TlsError."""
    certificates = secured(host)
    loop = asyncio.get_running_loop()
    if certificates is None:
        transport, _ = await loop.create_connection(protocol, host, port)
    else:
        transport, _ = await loop.create_connection(
            protocol,
            host,
            port,
            ssl=certificates.client,
            server_hostname="",
            ssl_handshake_timeout=_HANDSHAKE_S,
        )
    notice_loss(transport, host)
    return transport


class Listener:
    """Where connections are accepted, until it is closed; accepted connections live on."""

    def __init__(self, port: int, close: Callable[[], object]) -> None:
        self.port = port
        self._close = close

    def close(self) -> None:
        """Accept no further connection. Idempotent."""
        self._close()


async def listen(
    protocol: Callable[[], asyncio.Protocol], service: str, host: str, port: int
) -> Listener:
    """Accept connections; those that fail in TLS are refused, counted and logged as ``service``'s.

    Raises OSError, TlsError.
    """
    loop = asyncio.get_running_loop()
    if secured(host) is None:
        server = await loop.create_server(protocol, host, port)
        return Listener(server.sockets[0].getsockname()[1], server.close)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=_MAX_PENDING)
    accepting = loop.create_task(serve(listening, protocol, service))
    return Listener(listening.getsockname()[1], accepting.cancel)


async def serve(
    listening: socket.socket, protocol: Callable[[], asyncio.Protocol], service: str
) -> None:
    """Accept connections on a socket, as ``listen`` does, until cancelled; then close it.

    Each connection gets the certificate that is current by then. Raises TlsError.
    """
    loop = asyncio.get_running_loop()
    certificates = secured(listening.getsockname()[0])
    will_refuse(service)
    if certificates is None:
        server = await loop.create_server(protocol, sock=listening)
        try:
            await server.serve_forever()
        finally:
            server.close()
        return
    listening.setblocking(False)
    pending: set[asyncio.Task[None]] = set()
    try:
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError as error:  # no descriptors are left, or the peer was faster
                log.warning("%s: a connection could not be accepted: %s", service, error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(pending) >= _MAX_PENDING:
                sock.close()
                peer = address_text(address)
                note_refusal(service, peer, "too many connections are in their TLS handshake")
                continue
            task = loop.create_task(_admit(sock, address, protocol, service, certificates))
            pending.add(task)
            task.add_done_callback(pending.discard)
    finally:
        listening.close()
        for task in pending:
            task.cancel()


async def _admit(
    sock: socket.socket,
    address: Any,
    protocol: Callable[[], asyncio.Protocol],
    service: str,
    certificates: Certificates,
) -> None:
    try:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: _AfterTls(protocol),
            sock,
            ssl=certificates.server,
            ssl_handshake_timeout=_HANDSHAKE_S,
        )
    except OSError as error:
        sock.close()
        note_refusal(service, address_text(address), _reason(error))
        # It leads back to itself, and to the 256 KiB of the connection, until cycles are collected.
        error.__traceback__ = None
    else:
        notice_loss(transport, "")


class _AfterTls(asyncio.Protocol):
    """Makes the connection's protocol once TLS is complete.

    A server that keeps its protocols until they are lost would keep those of refused connections:
    asyncio makes them before TLS, and of what never began, no loss is told.
    """

    def __init__(self, make: Callable[[], asyncio.Protocol]) -> None:
        self._make = make

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or str(error)).lower().replace('_', ' ')}"
    return "it did not complete TLS"


def notice_loss(transport: asyncio.BaseTransport, host: str) -> None:
    """Have the system end the connection within seconds of the other host's disappearance."""
    sock = transport.get_extra_info("socket")
    if sock is None or is_loopback(host):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED_MS)


def unacknowledged_s(transport: asyncio.BaseTransport) -> float:
    """Since when the peer's system has acknowledged nothing, while anything waits for it; else 0.

    A system acknowledges what a stopped or busy process does not read: it has vanished, or is cut
    off. The clock is this system's: who was paused itself finds what came meanwhile.
    """
    sock = transport.get_extra_info("socket")
    if sock is None:
        return 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    segments, last_ms = _TCP_INFO.unpack(info)
    return last_ms / 1000 if segments else 0.0

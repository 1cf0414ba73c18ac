"""What each end of a connection asks of the other before any message.

A gate is the one place that decides how processes prove who they are: by the run's secret, and
between hosts by their certificates, too.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from ipaddress import IPv6Address, ip_address
from typing import Any

from commutator.trust.handshake import ClientHandshake, Handshake, ServerHandshake
from commutator.trust.identity import Identity, Right
from commutator.trust.network import TlsError, network_of_this_process, peer_identity
from commutator.trust.refusals import note_refusal, will_refuse
from commutator.trust.secret import RunSecret, secret_of_this_process

_DEADLINE_S = 5.0
_MAX_PENDING = 128
"""Connections whose peer has not proved itself yet; the oldest ones make room for new ones."""


def address_text(address: Any) -> str:
    """A socket's address as both ends write it: IPv4 also where it arrived mapped into IPv6."""
    if not isinstance(address, tuple) or len(address) < 2:  # noqa: PLR2004 - host, port
        return str(address or "")
    host = ip_address(str(address[0]).partition("%")[0])
    if isinstance(host, IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    return f"{host}:{address[1]}"


def _end(transport: asyncio.Transport, name: str) -> str:
    """The server's end of a connection, which both ends prove that they mean.

    With TLS the certificates say who is there, also where addresses are translated on the way.
    """
    if transport.get_extra_info("ssl_object") is not None:
        return "TLS"
    return address_text(transport.get_extra_info(name))


def _check_right(identity: Identity, right: Right) -> None:
    if not identity.may(right):
        raise TlsError(f"{identity} must not {right}")


class Gate(ABC):
    """One kind of handshake, for all connections of one client or server.

    Without ``secret`` it uses that of this process; a process of no run asks for no proof, and its
    gate is not ``closed``.
    """

    deadline_s: float = _DEADLINE_S
    """Seconds that a peer has for the whole handshake."""

    def __init__(self, service: str, secret: RunSecret | None = None) -> None:
        """``service`` is what the server serves; both ends name the same, such as "registry"."""
        self.service = service
        self._given = secret

    @property
    def secret(self) -> RunSecret | None:
        """The secret to prove now. Raises SecretFileError."""
        return self._given if self._given is not None else secret_of_this_process()

    def identify(self, transport: asyncio.Transport) -> Identity | None:
        """Who the peer is, by its certificate; None without TLS.

        Raises TlsError when it is of no process of this cluster.
        """
        identity = peer_identity(transport)
        network = network_of_this_process()
        if identity is not None and network is not None and identity.cluster != network.cluster:
            raise TlsError(f"{identity} is of another cluster than {network.cluster}")
        return identity

    @abstractmethod
    def enter(self, transport: asyncio.Transport) -> Handshake | None:
        """The handshake of a new connection; None when no proof is asked for."""

    @abstractmethod
    def leave(self, transport: asyncio.Transport, problem: str | None) -> None:
        """The handshake of a connection ended; ``problem`` is why it failed, None if it did not."""


class ClientGate(Gate):
    """For connections that this process makes."""

    def __init__(
        self,
        service: str,
        secret: RunSecret | None = None,
        *,
        expects: Right | None = None,
        host: str = "",
    ) -> None:
        """``expects`` is what the server's certificate must allow it; ``host`` whose it must be."""
        super().__init__(service, secret)
        self._expects = expects
        self._host = host

    def identify(self, transport: asyncio.Transport) -> Identity | None:
        """Raises TlsError also when it is not who is meant."""
        identity = super().identify(transport)
        if identity is not None:
            if self._expects is not None:
                _check_right(identity, self._expects)
            if self._host and identity.name != self._host:
                raise TlsError(f"{identity} is there instead of host {self._host}")
        return identity

    def enter(self, transport: asyncio.Transport) -> Handshake | None:
        secret = self.secret
        if secret is None:
            return None
        return ClientHandshake(secret, self.service, _end(transport, "peername"))

    def leave(self, transport: asyncio.Transport, problem: str | None) -> None:
        """Nothing to do: the caller that opened the connection gets the problem."""


class ServerGate(Gate):
    """For connections that this process accepts; counts and logs those that it refuses."""

    def __init__(
        self,
        service: str,
        secret: RunSecret | None = None,
        *,
        expects: Right | None = None,
        max_pending: int = _MAX_PENDING,
    ) -> None:
        """``expects`` is a right that each client's certificate must give it."""
        super().__init__(service, secret)
        will_refuse(service)
        self._expects = expects
        self._max_pending = max_pending
        self._pending: dict[asyncio.Transport, None] = {}

    def identify(self, transport: asyncio.Transport) -> Identity | None:
        try:
            identity = super().identify(transport)
            if identity is not None and self._expects is not None:
                _check_right(identity, self._expects)
        except TlsError as error:
            self.refuse(transport, str(error))
            raise
        return identity

    def refuse(self, transport: asyncio.Transport, reason: str) -> None:
        """Count and log a connection, or what was asked on it, that is refused."""
        note_refusal(self.service, address_text(transport.get_extra_info("peername")), reason)

    def enter(self, transport: asyncio.Transport) -> Handshake | None:
        secret = self.secret
        if secret is None:
            return None
        if len(self._pending) >= self._max_pending:
            oldest = next(iter(self._pending))
            self.leave(oldest, "too many connections wait to prove themselves")
            oldest.abort()
        self._pending[transport] = None
        return ServerHandshake(secret, self.service, _end(transport, "sockname"))

    def leave(self, transport: asyncio.Transport, problem: str | None) -> None:
        pending = transport in self._pending
        self._pending.pop(transport, None)
        if pending and problem is not None:
            self.refuse(transport, problem)

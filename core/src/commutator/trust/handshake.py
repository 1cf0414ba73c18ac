"""Mutual proof at the start of a connection. Pure: bytes in, bytes out.

    client -> server    magic, client nonce
    server -> client    magic, server nonce, MAC "server"
    client -> server    MAC "client"

Each MAC covers the service, the address of the connection and both nonces, under the run's secret.
Neither side sends anything but random bytes before the other has proved that it knows the secret:
a stranger at a port that a dead process left gets no prompt. It cannot pass the messages on to a
live process either, as that one listens at another address.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from hmac import compare_digest

from commutator.trust.secret import RunSecret

MAGIC = b"CMTR\x00HS\x01"
"""Longer than any frame, when read as the length of one, so that other peers close at once."""
NONCE_BYTES = 32
MAC_BYTES = 32


class HandshakeError(Exception):
    """The peer did not prove that it belongs to this run."""


class Handshake(ABC):
    """One side of one connection's handshake.

    ``address`` is that of the server's end of the connection, such as "127.0.0.1:40001".
    """

    def __init__(
        self,
        secret: RunSecret,
        service: str,
        address: str,
        *,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.proven = False
        """The peer knows the secret, and all bytes from now on are its messages."""
        self._secret = secret
        self._context = (service.encode(), address.encode())
        self._nonce = random_bytes(NONCE_BYTES)
        self._received = b""

    @abstractmethod
    def begin(self) -> bytes:
        """What to send at once."""

    @abstractmethod
    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Take received bytes. Returns what to send, and what follows the handshake.

        Raises HandshakeError for a peer that is not of this run.
        """

    def _take(self, data: bytes, size: int) -> bytes | None:
        """The next message of ``size`` bytes, once it is complete. Its first byte already counts.

        A stranger who speaks another protocol is refused with the first bytes that differ.
        """
        self._received += data
        if size > MAC_BYTES and not MAGIC.startswith(self._received[: len(MAGIC)]):
            raise HandshakeError("it does not speak this run's handshake")
        if len(self._received) < size:
            return None
        message, self._received = self._received[:size], self._received[size:]
        return message

    def _mac(self, sender: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
        return self._secret.mac(sender, *self._context, client_nonce, server_nonce)


class ClientHandshake(Handshake):
    """The side that connects."""

    def begin(self) -> bytes:
        return MAGIC + self._nonce

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        message = self._take(data, len(MAGIC) + NONCE_BYTES + MAC_BYTES)
        if message is None:
            return b"", b""
        server_nonce = message[len(MAGIC) : -MAC_BYTES]
        if not compare_digest(message[-MAC_BYTES:], self._mac("server", self._nonce, server_nonce)):
            raise HandshakeError("it does not know the secret of this run")
        self.proven = True
        return self._mac("client", self._nonce, server_nonce), self._received


class ServerHandshake(Handshake):
    """The side that listens."""

    _client_nonce: bytes | None = None

    def begin(self) -> bytes:
        return b""

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        answer = b""
        if self._client_nonce is None:
            hello = self._take(data, len(MAGIC) + NONCE_BYTES)
            if hello is None:
                return b"", b""
            self._client_nonce, data = hello[len(MAGIC) :], b""
            answer = MAGIC + self._nonce + self._mac("server", self._client_nonce, self._nonce)
        proof = self._take(data, MAC_BYTES)
        if proof is None:
            return answer, b""
        if not compare_digest(proof, self._mac("client", self._client_nonce, self._nonce)):
            raise HandshakeError("it does not know the secret of this run")
        self.proven = True
        return answer, self._received

"""CURVE on sockets of KV events: between hosts they are encrypted, and know their readers.

Each publisher makes a key pair at its start, whose public key readers find in the registry. Readers
have one pair in common, made from the run's secret: readers that do not know it are refused.
"""

from __future__ import annotations

from functools import lru_cache

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from commutator.trust import (
    Network,
    RunSecret,
    network_of_this_process,
    note_refusal,
    secret_of_this_process,
    will_refuse,
)

SERVICE = "KV events"
"""The service that refused readers are counted for."""

_ZAP = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it did not complete the handshake of CURVE",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak CURVE with this socket's key",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not that of this run's readers",
}


@lru_cache(maxsize=1)
def reader_keys(secret: RunSecret) -> tuple[bytes, bytes]:
    """The public and the secret key (Z85) of the readers of a run."""
    secret_key = z85.encode(secret.mac("KV event readers"))
    return zmq.curve_public(secret_key), secret_key


def network_to_guard() -> Network | None:
    """The network on which this process publishes with CURVE; None: it needs none, or may not."""
    network = network_of_this_process()
    return network if network is not None and network.spans_hosts and network.tls else None


def read_with(socket: zmq.Socket[bytes], server_key: str | None, endpoint: str) -> None:
    """Prepare a reader's socket for a publisher. Raises ValueError when it must not connect."""
    if server_key is None:
        network = network_of_this_process()
        if network is not None and network.tls is not None and endpoint.startswith("tcp://"):
            host = endpoint.removeprefix("tcp://").rpartition(":")[0]
            if host not in ("127.0.0.1", "[::1]"):
                raise ValueError(f"{endpoint}: publishes KV events without encryption")
        return
    secret = secret_of_this_process()
    if secret is None:
        raise ValueError(f"{endpoint}: encrypts KV events for a run that this process is not of")
    socket.curve_publickey, socket.curve_secretkey = reader_keys(secret)
    socket.curve_serverkey = server_key.encode()


class ReaderGuard:
    """Encrypts sockets of one ZMQ context, and lets the readers of this run in, and nobody else.

    Used from the thread that owns the sockets, except for the constructor.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], secret: RunSecret) -> None:
        will_refuse(SERVICE)
        public, self._secret_key = zmq.curve_keypair()
        self.public_key = public.decode()
        """What readers need to know, as Z85."""
        self._allowed = z85.decode(reader_keys(secret)[0])
        # Without this handler ZMQ lets everyone in who knows the public key.
        self._handler = context.socket(zmq.REP)
        self._handler.linger = 0
        self._handler.bind(_ZAP)
        self._monitors: list[zmq.Socket[bytes]] = []
        self._guarded: list[zmq.Socket[bytes]] = []

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Prepare a socket that is about to be bound."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret_key
        self._guarded.append(socket)
        self._monitors.append(socket.get_monitor_socket(sum(_FAILURES)))

    def work(self) -> None:
        """Answer waiting handshakes, and count those that failed. Never blocks."""
        while int(self._handler.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._handler.send_multipart(self._answer(self._handler.recv_multipart()))
        for monitor in self._monitors:
            while int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                event = parse_monitor_message(monitor.recv_multipart())
                note_refusal(SERVICE, "a reader", _FAILURES[event["event"]])

    def close(self) -> None:
        """Close everything but the guarded sockets. Idempotent."""
        for socket, monitor in zip(self._guarded, self._monitors, strict=True):
            socket.disable_monitor()
            monitor.close(linger=0)
        self._guarded, self._monitors = [], []
        self._handler.close(linger=0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """To the request: version, id, domain, address, identity, mechanism, credentials."""
        identifier = request[1] if len(request) > 1 else b""
        match request:
            case [_, _, _, _, _, b"CURVE", key] if key == self._allowed:
                status = b"200", b"OK"
            case _:
                status = b"400", b"not a reader of this run"
        return [_ZAP_VERSION, identifier, *status, b"", b""]

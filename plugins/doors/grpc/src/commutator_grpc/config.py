"""The options of the gRPC door: keys, TLS, what clients may send and withhold."""

from __future__ import annotations

import ssl
from pathlib import Path

from attrs import frozen

from commutator import DoorConfig, PositiveInt, PositiveSeconds, Secret, setting
from commutator.contract.door import Operations


@frozen(kw_only=True)
class GrpcTlsConfig:
    """Serve over TLS."""

    cert_file: str = setting("PEM file with the certificate chain.")
    key_file: str = setting("PEM file with the private key.")
    client_ca_file: str | None = setting(
        "PEM file with the authorities whose certificates clients must have; without it, clients "
        "need none. A certificate opens the connection; keys say who sends a request.",
        None,
    )

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """(key, certificates, authorities of clients). Raises OSError."""
        of_clients = None if self.client_ca_file is None else Path(self.client_ca_file).read_bytes()
        return Path(self.key_file).read_bytes(), Path(self.cert_file).read_bytes(), of_clients

    def problem(self) -> str | None:
        """Why the files cannot be used; None: they can."""
        files = f"certificate {self.cert_file} with key {self.key_file}"
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self.cert_file, self.key_file)
            if self.client_ca_file is not None:
                files = f"client_ca_file {self.client_ca_file}"
                context.load_verify_locations(self.client_ca_file)
        except (OSError, ssl.SSLError) as error:
            return f"{files}: {error}"
        return None


@frozen(kw_only=True)
class GrpcServerConfig(DoorConfig):
    """What every door that listens for gRPC has."""

    operations: Operations = setting(
        "Only `off`: operators need a door of kind `http`, such as `frontend.admin`.", "off"
    )
    api_keys: tuple[Secret, ...] = setting(
        "Clients must send one of these as a bearer token in the metadata `authorization`; empty "
        "lets everyone in.",
        (),
    )
    tls: GrpcTlsConfig | None = setting("Serve over TLS.", None)
    max_message_bytes: PositiveInt = setting(
        "Larger messages of clients are answered RESOURCE_EXHAUSTED.", 8 << 20
    )
    max_calls: PositiveInt = setting(
        "Calls to one front-door process that are open at the same time, streams among them; one "
        "more is answered RESOURCE_EXHAUSTED.",
        2048,
    )
    max_connections: PositiveInt = setting(
        "Connections of clients to one front-door process; one more is closed.", 4096
    )
    ping_s: PositiveSeconds = setting(
        "Seconds without a sign of life from a connection after which it is pinged, so that "
        "proxies do not cut it while an answer is awaited.",
        10.0,
    )
    ping_timeout_s: PositiveSeconds = setting(
        "Seconds after which a client that does not answer a ping is gone.", 20.0
    )
    min_ping_interval_s: PositiveSeconds = setting(
        "Clients that ping more often than this, in seconds, are disconnected.", 5.0
    )
    keep_alive_timeout_s: PositiveSeconds = setting(
        "Seconds after which a connection without a call is closed.", 600.0
    )


@frozen(kw_only=True)
class GrpcConfig(GrpcServerConfig):
    """gRPC over HTTP/2, with or without TLS."""

    message_timeout_s: PositiveSeconds = setting(
        "Longest time for the message of a call to arrive; then DEADLINE_EXCEEDED.", 60.0
    )
    write_timeout_s: PositiveSeconds = setting(
        "Longest time for a client to read a message. Then its request, or all those of its "
        "stream, are given up; the call ends when the client has read it, or leaves.",
        60.0,
    )
    max_unread_bytes: PositiveInt = setting(
        "Bytes of answers that clients of one front-door process have still to read. Where there "
        "are more, connections are closed, that first on which a message has waited for longest.",
        256 << 20,
    )
    max_stream_requests: PositiveInt = setting(
        "Messages of one stream that are answered at the same time; one more is refused.", 1024
    )
    stream_idle_s: PositiveSeconds = setting(
        "Seconds after which a stream is ended whose client asks for nothing.", 600.0
    )
    reflection: bool = setting(
        "Whether clients may ask what services there are, as `grpcurl` does.", True
    )

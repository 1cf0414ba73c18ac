"""The options of the HTTP door: API keys, CORS origins, TLS, what clients may send and withhold."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from attrs import Attribute, frozen

from commutator import DoorConfig, NonNegativeInt, PositiveInt, PositiveSeconds, Secret, setting
from commutator.errors import ConfigError

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://((?:[a-z0-9_.-]+|\[[0-9a-f:.]+\]))(?::([0-9]+))?")
_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_USUAL_PORTS = {"http": "80", "https": "443"}


def origin_problem(text: str) -> str | None:
    """Why no browser sends ``text`` as its ``Origin``, and what to write; None for a good one."""
    if text in {"*", "null"}:
        return None
    match = _ORIGIN.fullmatch(text)
    if match is not None and match[3] != _USUAL_PORTS.get(match[1], ""):
        return None
    better = _nearest(text) or 'it as "https://chat.example"'
    return f'"{text}" is no origin, so no page would ever match: write {better}'


def _nearest(text: str) -> str | None:
    """The origin that was probably meant, in quotes."""
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        host, port = parts.hostname or "", parts.port
        host = f"[{host}]" if ":" in host else host.encode("idna").decode()
    except (ValueError, UnicodeError):
        return None
    scheme = parts.scheme.lower()
    usual = port is None or str(port) == _USUAL_PORTS.get(scheme)
    origin = f"{scheme}://{host}" + ("" if usual else f":{port}")
    return f'"{origin}"' if _ORIGIN.fullmatch(origin) else None


@frozen(kw_only=True)
class TlsConfig:
    """Serve HTTPS instead of HTTP."""

    cert_file: str = setting("PEM file with the certificate chain.")
    key_file: str = setting("PEM file with the private key.")


def _are_origins(_: object, _field: Attribute[Any], value: tuple[str, ...]) -> None:
    if problems := [problem for origin in value if (problem := origin_problem(origin))]:
        raise ValueError("; ".join(problems))


def _are_hosts(_: object, _field: Attribute[Any], value: tuple[str, ...]) -> None:
    for host in value:
        if host != "*" and not _HOST.fullmatch(host):
            raise ValueError(f'"{host}" is no name: write it as "llm.example", without a port')


@frozen(kw_only=True)
class HttpConfig(DoorConfig):
    """HTTP/1.1, with or without TLS."""

    max_body_bytes: PositiveInt = setting("Larger request bodies are answered 413.", 8 << 20)
    header_timeout_s: PositiveSeconds = setting(
        "Longest time for the headers of a request to arrive; then 408.", 10.0
    )
    body_timeout_s: PositiveSeconds = setting(
        "Longest time for the body of a request to arrive; then 408.", 60.0
    )
    keep_alive_timeout_s: PositiveSeconds = setting(
        "Seconds from an answer until a connection without another request is closed.", 75.0
    )
    write_timeout_s: PositiveSeconds = setting(
        "Seconds in which a client has to read some of an answer that waits for it; then the "
        "connection is closed. An answer that is still being generated has the deadline of its "
        "request, too, and no other.",
        60.0,
    )
    ping_s: PositiveSeconds = setting(
        "Seconds without a piece of a stream after which its client is sent one that says nothing, "
        "so that proxies do not cut a silent connection. A ping begins the answer: a failure after "
        "it ends a stream whose status was 200.",
        10.0,
    )
    max_connections: PositiveInt = setting(
        "Connections of clients to one front-door process. When there are more, the one that has "
        "waited longest for its client is closed, those without a known key first.",
        4096,
    )
    max_connections_per_address: NonNegativeInt = setting(
        "Connections from one address (of IPv6, one /64 network) to one front-door process; 0: no "
        "limit, as behind a proxy.",
        0,
    )
    max_websockets: PositiveInt = setting(
        "WebSockets to one front-door process; one more is answered 503. A message may have "
        "`max_body_bytes`, and as much may wait while it is answered, in four messages at most.",
        128,
    )
    websocket_idle_s: PositiveSeconds = setting(
        "Seconds after which a WebSocket is closed whose client asks for nothing.", 600.0
    )
    websocket_ping_s: PositiveSeconds = setting(
        "Seconds without a sign of life after which a WebSocket's client is pinged; one that does "
        "not answer for half as long is gone.",
        30.0,
    )
    api_keys: tuple[Secret, ...] = setting(
        "Clients must send one of these as a bearer token; empty lets everyone in.", ()
    )
    cors_origins: tuple[str, ...] = setting(
        'Browser origins that may call, such as "https://chat.example"; "*" allows every one.',
        (),
        validator=_are_origins,
    )
    allowed_hosts: tuple[str, ...] = setting(
        "Names by which clients may call a door that asks for no key, as in the header Host: so no "
        "page of another site uses it under a name that its owner let point here. IP addresses, "
        'names without a dot, and those that end in ".local", ".localhost" or ".internal" always '
        'may; "*" allows every one.',
        (),
        validator=_are_hosts,
    )
    tls: TlsConfig | None = setting("Serve HTTPS.", None)


def key_problems(keys: Iterable[Secret]) -> Iterator[str]:
    """Keys that no client could ever send as a bearer token, as problems of a door."""
    for number, secret in enumerate(keys):
        try:
            key = secret.reveal()
        except ConfigError:
            continue  # other checks report it
        if key != key.strip() or not key.isprintable():
            place = f"environment variable {secret.env}" if secret.env else f"file {secret.file}"
            yield (
                f"api_keys[{number}]: {place} holds spaces around the key, a line break or another "
                "control character, so no bearer token would ever match; remove them"
            )


def tls_context(config: TlsConfig) -> ssl.SSLContext:
    """Raises ConfigError when the files cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.cert_file, config.key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            [f"certificate {config.cert_file} with key {config.key_file}: {error}"], "frontend.tls"
        ) from error
    return context

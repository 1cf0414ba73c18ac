"""A host among others: where its processes listen, and the TLS by which hosts know each other.

Without a network, or on the loopback interface, connections are those of one machine: without TLS.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from commutator.errors import CommutatorError
from commutator.trust.identity import Identity, identity_in

log = logging.getLogger("commutator.trust")

NETWORK = "COMMUTATOR_NETWORK"
"""The environment variable with the ``Network`` of a process, as JSON; it holds no secret."""

_WARN_BEFORE_S = 14 * 86_400
_LOOK_EVERY_S = 1.0
_WARN_EVERY_S = 86_400.0


class TlsError(CommutatorError):
    """The certificates of this host cannot be used."""


@frozen
class TlsFiles:
    """Paths of PEM files."""

    ca_file: str
    """The authorities whose certificates are accepted; two while the authority is changed."""
    cert_file: str
    key_file: str

    def absolute(self) -> TlsFiles:
        """The same files, for processes in other working folders."""
        files = (self.ca_file, self.cert_file, self.key_file)
        return TlsFiles(*(str(Path(file).expanduser().absolute()) for file in files))


@frozen
class Network:
    """What the processes of one host know of its network."""

    cluster: str
    host: str
    """The name of this host."""
    listen: str = "127.0.0.1"
    """The IP address at which its workers listen."""
    advertise: str = "127.0.0.1"
    """The IP address at which others reach them."""
    tls: TlsFiles | None = None
    """None: connections between hosts are not encrypted, which `insecure: true` allows."""

    @property
    def spans_hosts(self) -> bool:
        """Whether other hosts can reach its processes."""
        return not is_loopback(self.listen)

    def to_json(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Network:
        """The inverse of ``to_json``."""
        values = json.loads(text)
        tls = values.pop("tls")
        return cls(**values, tls=None if tls is None else TlsFiles(**tls))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_used: list[Network | None] = []


@contextmanager
def use_network(network: Network | None) -> Iterator[None]:
    """Make ``network`` that of this process inside the block."""
    _used.append(network)
    try:
        yield
    finally:
        _used.remove(network)


def network_of_this_process() -> Network | None:
    """The network that this process belongs to; None when it serves its own machine alone."""
    if _used:
        return _used[-1]
    text = os.environ.get(NETWORK)
    return _parsed(text) if text else None


@lru_cache(maxsize=1)
def _parsed(text: str) -> Network:
    return Network.from_json(text)


@frozen
class _Loaded:
    server: ssl.SSLContext
    client: ssl.SSLContext
    identity: Identity
    ends_unix_s: float


class Certificates:
    """The TLS contexts made from one host's files, read again when they change.

    Connections that exist keep theirs. Files that cannot be used, such as a certificate whose key
    is still being copied, change nothing: the last good ones stay in use.
    """

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises TlsError when the files cannot be used."""
        self._files = files
        self._clock = clock
        self._state = _state(files)
        self._loaded = _load(files)
        self._looked_s = clock()
        self._warned_s: float | None = None
        self._warn()

    @property
    def identity(self) -> Identity:
        """Who this host is."""
        return self._current().identity

    @property
    def server(self) -> ssl.SSLContext:
        """For the next connection that is accepted."""
        return self._current().server

    @property
    def client(self) -> ssl.SSLContext:
        """For the next connection that is made."""
        return self._current().client

    def _current(self) -> _Loaded:
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            self._look()
            self._warn()
        return self._loaded

    def _look(self) -> None:
        state = _state(self._files)
        if state == self._state:
            return
        self._state = state
        try:
            self._loaded = _load(self._files)
        except TlsError as error:
            log.warning("the former certificate stays in use: %s", error)
        else:
            self._warned_s = None
            log.info("%s: read anew", self._files.cert_file)

    def _warn(self) -> None:
        left_s = self._loaded.ends_unix_s - time.time()
        now_s = self._clock()
        again = self._warned_s is None or now_s - self._warned_s >= _WARN_EVERY_S
        if left_s < _WARN_BEFORE_S and again:
            self._warned_s = now_s
            when = f"expires in {left_s / 86_400:.1f} days" if left_s > 0 else "has expired"
            log.warning("%s %s: renew it (commutator certs renew)", self._files.cert_file, when)


def _state(files: TlsFiles) -> tuple[object, ...]:
    """Something that differs once a file has changed."""
    found: list[object] = []
    for path in (files.ca_file, files.cert_file, files.key_file):
        try:
            status = Path(path).stat()
        except OSError as error:
            found.append(error.errno)
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _load(files: TlsFiles) -> _Loaded:
    server = _context(files, ssl.PROTOCOL_TLS_SERVER)
    client = _context(files, ssl.PROTOCOL_TLS_CLIENT)
    certificate = _shake_hands_with_itself(server, client, files)
    identity = identity_in(_uris(certificate))
    if identity is None:
        raise TlsError(
            f"{files.cert_file}: names no process of a cluster (commutator://CLUSTER/KIND/NAME); "
            "make one with `commutator certs issue`"
        )
    return _Loaded(server, client, identity, ssl.cert_time_to_seconds(certificate["notAfter"]))


def _context(files: TlsFiles, side: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname = False  # the gate compares what a certificate says with who is meant
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    path = files.ca_file
    try:
        context.load_verify_locations(files.ca_file)
        path = files.cert_file
        Path(path).read_bytes()  # the next call does not say which of its files is missing
        path = files.key_file
        Path(path).read_bytes()
        context.load_cert_chain(files.cert_file, files.key_file)
    except ssl.SSLError as error:
        reason = "not the key of " + files.cert_file if path == files.key_file else "not PEM"
        raise TlsError(f"{path}: {reason} ({error.reason or error})") from error
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror or error}") from error
    return context


def _shake_hands_with_itself(
    server: ssl.SSLContext, client: ssl.SSLContext, files: TlsFiles
) -> dict[str, Any]:
    """This host's own certificate, as its peers will see it. Raises TlsError if they refuse it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(ends)
    while waiting:
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                reason = getattr(error, "verify_message", "") or error.reason or str(error)
                raise TlsError(
                    f"{files.cert_file}: other hosts would refuse it: {reason}; it must be signed "
                    f"by an authority in {files.ca_file}, and valid now"
                ) from error
    return dict(ends[1].getpeercert() or {})


def _uris(certificate: Mapping[str, Any]) -> list[str]:
    names = certificate.get("subjectAltName", ())
    return [value for kind, value in names if kind == "URI"]


def peer_identity(transport: asyncio.BaseTransport) -> Identity | None:
    """Who the certificate of the other end names; None without TLS.

    Raises TlsError when it names nobody.
    """
    tls = transport.get_extra_info("ssl_object")
    if tls is None:
        return None
    identity = identity_in(_uris(tls.getpeercert() or {}))
    if identity is None:
        raise TlsError("its certificate names no process of a cluster")
    return identity

"""Certificates for tests: an authority of ours, one of others, and networks that use them."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from commutator.trust import Network, TlsFiles, use_network, wire
from commutator.trust.identity import Identity, Kind
from commutator_certs.authority import Authority

__all__ = ["CLUSTER", "Authorities", "on_a_network"]

CLUSTER = "test"


class Authorities:
    """Our authority in ``ours``, and another of a cluster of the same name in ``theirs``."""

    def __init__(self, folder: Path) -> None:
        self.now = datetime.now(UTC)
        self.ours = Authority.create(folder / "ours", CLUSTER, self.now)
        self.theirs = Authority.create(folder / "theirs", CLUSTER, self.now)

    def files(
        self,
        name: str,
        kind: Kind = Kind.HOST,
        *,
        by: Authority | None = None,
        cluster: str = CLUSTER,
        valid: timedelta = timedelta(days=90),
    ) -> TlsFiles:
        """The files of a host that trusts our authority, with a new certificate of ``by``."""
        authority = by or self.ours
        file = authority.issue(Identity(cluster, kind, name), [], self.now, valid, replace=True)
        return TlsFiles(str(self.ours.folder / "ca.pem"), str(file), str(file.with_suffix(".key")))

    def files_of_nobody(self) -> TlsFiles:
        """Of our authority, and of no process of a cluster, such as those of etcd."""
        other = cast(Identity, SimpleNamespace(name="other"))
        file = self.ours.issue(other, [], self.now, timedelta(days=90), replace=True)
        return TlsFiles(str(self.ours.folder / "ca.pem"), str(file), str(file.with_suffix(".key")))

    def network(self, name: str, kind: Kind = Kind.HOST) -> Network:
        return Network(CLUSTER, name, "0.0.0.0", "127.0.0.1", self.files(name, kind))

    def context(self, files: TlsFiles | None) -> ssl.SSLContext:
        """What a client can do that checks nothing of its own certificate; None: it has none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(self.ours.folder / "ca.pem")
        if files is not None:
            context.load_cert_chain(files.cert_file, files.key_file)
        return context


@contextmanager
def on_a_network(monkeypatch: pytest.MonkeyPatch, network: Network | None) -> Iterator[None]:
    """This process is a host of a cluster, and 127.0.0.1 counts as an address between hosts."""
    monkeypatch.setattr(wire, "is_loopback", lambda _: False)
    with use_network(network):
        yield

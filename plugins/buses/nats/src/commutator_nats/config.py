"""The options of the event bus `nats`."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from attrs import Attribute, frozen

from commutator import PositiveInt, Secret, setting
from commutator.contract.event_bus import EventBusConfig
from commutator.registry import is_loopback


@frozen(kw_only=True)
class NatsTls:
    """Certificates for `tls` servers. The files are read again at each connection."""

    ca_file: str = setting("PEM file with the authorities that sign the servers' certificates.")
    cert_file: str | None = setting(
        "PEM file with this deployment's certificate, for servers that verify their clients.", None
    )
    key_file: str | None = setting("PEM file with the key of `cert_file`.", None)

    def __attrs_post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("expected cert_file and key_file, or neither")


def _servers(_: object, _field: Attribute[Any], value: tuple[str, ...]) -> None:
    if not value:
        raise ValueError("expected at least one")
    for url in value:
        parts = urlsplit(url)
        try:
            complete = parts.scheme in {"nats", "tls"} and parts.hostname and parts.port
        except ValueError:  # the port is no number
            complete = False
        if parts.username or parts.password:
            # Not repeated: it holds a secret.
            raise ValueError("a server holds a user; use `token` or `nkey_seed` instead")
        if not complete or parts.path.strip("/"):
            raise ValueError(f"expected nats://HOST:PORT or tls://HOST:PORT, got {url!r}")
    if len({urlsplit(url).scheme for url in value}) > 1:
        raise ValueError("expected either nats or tls for all, got both")


def _cluster(_: object, _field: Attribute[Any], value: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", value):
        raise ValueError(f"expected letters, digits, '_' and '-', got {value!r}")


@frozen(kw_only=True, slots=False)  # so that classes of options may have it beside another base
class NatsServers:
    """Where NATS is, and how it knows us."""

    servers: tuple[str, ...] = setting(
        "The servers of one NATS cluster, such as tls://10.0.0.1:4222; tried in turn.",
        ("nats://127.0.0.1:4222",),
        validator=_servers,
    )
    cluster: str = setting(
        "Deployments with the same name, and the same `runtime.secret`, share what they have here. "
        "Subjects begin with commutator.CLUSTER.",
        "default",
        validator=_cluster,
    )
    tls: NatsTls | None = setting("Required for `tls` servers.", None)
    token: Secret | None = setting("The token that the servers ask for.", None)
    nkey_seed: Secret | None = setting(
        "The seed of this deployment's nkey (SU...), whose public key the servers know.", None
    )
    insecure: bool = setting(
        "Allow `nats` servers on other hosts: everyone on the network between reads all that "
        "goes there, and the token.",
        False,
    )

    def __attrs_post_init__(self) -> None:
        if self.encrypted and self.tls is None:
            raise ValueError("tls servers need `tls` with a ca_file")
        if not self.encrypted and self.tls is not None:
            raise ValueError("`tls` needs tls servers")
        if self.token is not None and self.nkey_seed is not None:
            raise ValueError("expected token or nkey_seed, got both")
        if not self.encrypted and not self.insecure:
            for url in self.servers:
                if not is_loopback(urlsplit(url).hostname or ""):
                    raise ValueError(
                        f"{url} is on another host: use tls, or allow plain text by "
                        "`insecure: true`"
                    )

    @property
    def encrypted(self) -> bool:
        """Whether the servers are reached by TLS."""
        return self.servers[0].startswith("tls:")

    @property
    def authenticates(self) -> bool:
        """Whether the servers are shown who connects."""
        shows_certificate = self.tls is not None and self.tls.cert_file is not None
        return shows_certificate or self.token is not None or self.nkey_seed is not None


@frozen(kw_only=True)
class NatsConfig(NatsServers, EventBusConfig):
    """KV events over NATS 2.2 or later, for some 50 workers and 50 front doors, or more."""

    max_waiting_messages: PositiveInt = setting(
        "Messages of one worker that a front door holds while it is busy. It drops what comes "
        "beyond, and asks the worker's host for it later.",
        20_000,
    )

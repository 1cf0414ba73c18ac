"""The options of the registry `etcd`."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from attrs import Attribute, frozen

from commutator import PositiveSeconds, setting
from commutator.contract.registry import RegistryConfig
from commutator.registry import is_loopback


@frozen(kw_only=True)
class EtcdTls:
    """Certificates for `https` endpoints."""

    ca_file: str = setting("PEM file with the authorities that sign the members' certificates.")
    cert_file: str | None = setting(
        "PEM file with this deployment's certificate, for an etcd that asks for one; its common "
        "name is etcd's user.",
        None,
    )
    key_file: str | None = setting("PEM file with the key of `cert_file`.", None)

    def __attrs_post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("expected cert_file and key_file, or neither")


def _endpoints(_: object, _field: Attribute[Any], value: tuple[str, ...]) -> None:
    if not value:
        raise ValueError("expected at least one")
    for url in value:
        parts = urlsplit(url)
        try:
            complete = parts.scheme in {"http", "https"} and parts.hostname and parts.port
        except ValueError:  # the port is no number
            complete = False
        if not complete or parts.path.strip("/"):
            raise ValueError(f"expected http://HOST:PORT or https://HOST:PORT, got {url!r}")
    if len({urlsplit(url).scheme for url in value}) > 1:
        raise ValueError("expected either http or https for all, got both")


def _cluster(_: object, _field: Attribute[Any], value: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", value):
        raise ValueError(f"expected letters, digits, '.', '_' and '-', got {value!r}")


@frozen(kw_only=True)
class EtcdConfig(RegistryConfig):
    """Workers in etcd 3.4 or later, for deployments on several hosts, or that outlive a restart."""

    endpoints: tuple[str, ...] = setting(
        "Client URLs of etcd's members, such as https://10.0.0.1:2379; tried in turn.",
        ("http://127.0.0.1:2379",),
        validator=_endpoints,
    )
    cluster: str = setting(
        "Deployments with the same name, and the same `runtime.secret`, share their workers; "
        "`cluster.name` by default. Keys begin with /commutator/CLUSTER/v1/.",
        "default",
        validator=_cluster,
    )
    tls: EtcdTls | None = setting("Required for `https` endpoints; by default `cluster.tls`.", None)
    insecure: bool = setting(
        "Allow `http` endpoints on other hosts: everyone on the network between can read and "
        "change what etcd holds.",
        False,
    )
    call_timeout_s: PositiveSeconds = setting(
        "How long one member may take to answer before the next one is asked.", 1.5
    )
    resync_s: PositiveSeconds = setting(
        "How often the list of workers is read anew, beside being watched.", 60.0
    )

    def __attrs_post_init__(self) -> None:
        if self.encrypted and self.tls is None:
            raise ValueError("https endpoints need `tls` with a ca_file")
        if not self.encrypted and self.tls is not None:
            raise ValueError("`tls` needs https endpoints")
        if not self.encrypted and not self.insecure:
            for url in self.endpoints:
                if not is_loopback(urlsplit(url).hostname or ""):
                    raise ValueError(
                        f"{url} is on another host: use https, or allow plain text by "
                        "`insecure: true`"
                    )

    @property
    def encrypted(self) -> bool:
        """Whether the endpoints are reached by TLS."""
        return self.endpoints[0].startswith("https:")

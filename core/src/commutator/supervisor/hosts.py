"""This host in its cluster: its network, and the environment that its processes get."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from attrs import evolve

from commutator.config.load import Loaded
from commutator.config.model import Config
from commutator.config.secrets import foreign_variables
from commutator.contract.launcher import LauncherContext
from commutator.contract.registry import Registry
from commutator.errors import ConfigError
from commutator.launcher.child import LOG_LEVEL
from commutator.plugins import BLOCKED_PLUGINS
from commutator.registry.client import RegistryClient
from commutator.registry.memory import MemoryConfig
from commutator.trust import (
    NETWORK,
    SECRET_FILE,
    Network,
    Right,
    RunSecret,
    TlsError,
    TlsFiles,
    host_and_port,
    is_loopback,
)
from commutator.trust.wire import certificates_of

_SIOCGIFADDR = 0x8915
"""Asks Linux for the IPv4 address of an interface."""


def network_of(config: Config) -> Network | None:
    """This host's network; None for a deployment on one machine.

    Raises ConfigError when the certificate cannot be used, or is that of another host or cluster.
    """
    cluster = config.cluster
    if cluster.tls is None and not cluster.host.spans_hosts:
        return None
    tls = cluster.tls
    network = Network(
        cluster=cluster.name,
        host=cluster.host.name or "",
        listen=cluster.host.listen,
        advertise=cluster.host.reachable_at,
        tls=None if tls is None else TlsFiles(tls.ca_file, tls.cert_file, tls.key_file).absolute(),
    )
    try:
        certificates = certificates_of(network)
    except TlsError as error:
        raise ConfigError([f"cluster.tls: {error}"], "this machine") from error
    if certificates is None:
        return network
    identity = certificates.identity
    problems = []
    if identity.cluster != cluster.name:
        problems.append(
            f"cluster.tls.cert_file: {identity} is of cluster {identity.cluster}; set cluster.name "
            f"to it, or use a certificate of cluster {cluster.name}"
        )
    if cluster.host.name not in (None, identity.name):
        problems.append(
            f"cluster.tls.cert_file: {identity} is of host {identity.name}; set cluster.host.name "
            f"to it, or use the certificate of {cluster.host.name}"
        )
    if problems:
        raise ConfigError(problems, "this machine")
    return evolve(network, host=identity.name)


def run_secret(config: Config) -> RunSecret:
    """The secret of this run. Raises ConfigError or SecretFileError when it cannot be read."""
    if config.runtime.secret is not None:
        return RunSecret.from_text(config.runtime.secret.reveal())
    path = os.environ.get(SECRET_FILE)
    return RunSecret.load(path) if path else RunSecret.new()


def host_problems(config: Config) -> Iterator[str]:
    """What this machine lacks to be the host of a cluster that ``config`` describes."""
    try:
        network = network_of(config)
    except ConfigError as error:
        yield from error.problems
        return
    if network is None:
        return
    if config.runtime.secret is None and not os.environ.get(SECRET_FILE):
        yield (
            "runtime.secret: required for several hosts, the same on each: their processes prove "
            "to each other that they know it"
        )
    if not network.host:
        yield "cluster.host.name: required without a certificate that names this host"
    if network.spans_hosts and not _is_mine(network.advertise):
        yield (
            f"cluster.host.advertise: {network.advertise} is no address of this machine, so its "
            "workers could not check that it leads here; set an address of this machine"
        )


def cluster_warnings(config: Config) -> Iterator[str]:
    """A line, at each start, for what is less safe than it could be."""
    cluster = config.cluster
    if cluster.insecure:
        yield (
            "cluster.insecure: connections between hosts are not encrypted, and everyone on the "
            "network between reads prompts and answers"
        )


def serves_registry(config: Config, network: Network | None) -> tuple[str, int] | None:
    """Where this host serves the cluster's registry of kind `memory`; None: it does not."""
    registry = config.registry
    if network is None or not isinstance(registry, MemoryConfig) or registry.address is None:
        return None
    host, port = host_and_port(registry.address)
    return (network.listen, port) if host == network.advertise else None


def can_be_hub(config: Config, network: Network | None) -> bool:
    """Whether front doors of other hosts may share at this one (``registry.hub``)."""
    if network is None or not network.spans_hosts or config.registry.kind == "memory":
        return False
    certificates = certificates_of(network)
    return certificates is None or certificates.identity.may(Right.SERVE_REGISTRY)


def kv_host(config: Config, network: Network | None) -> str:
    """The address at which workers hand KV over, and lend it."""
    isolated = config.cluster.kv_network == "isolated"
    return network.advertise if network is not None and isolated else "127.0.0.1"


def transport_variables(
    config: Config, network: Network | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables that tell UCX, which moves KV, on which interfaces and ports to listen.

    UCX over TCP does what everyone who reaches it asks, so by default only this machine does.
    """
    interfaces = config.runtime.kv_interfaces
    if network is not None and config.cluster.kv_network != "isolated":
        interfaces = ("lo",)
    if interfaces is None and (given := environ.get("UCX_NET_DEVICES")):
        interfaces = (given,)
    if interfaces is None:
        address = kv_host(config, network)
        interfaces = ("lo" if is_loopback(address) else interface_of(address),)
    return {"UCX_NET_DEVICES": ",".join(interfaces), "UCX_TCP_PORT_RANGE": config.cluster.kv_ports}


def those_set(names: Iterable[str]) -> dict[str, str]:
    """Of ``names``, the environment variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def launcher_context(
    config: Config,
    network: Network | None,
    folder: Path,
    secret: RunSecret,
    on_line: Callable[[str, str, str], None],
) -> LauncherContext:
    """For the launcher of a run, whose ``secret`` is written into its ``folder``.

    Every child process gets this environment without the secrets that others need.
    """
    secret_file = folder / "secret"
    secret.save(secret_file)
    env = {
        **those_set(os.environ.keys() - foreign_variables(config)),
        **transport_variables(config, network, os.environ),
        **({} if network is None else {NETWORK: network.to_json()}),
        LOG_LEVEL: config.log.level.upper(),
        SECRET_FILE: str(secret_file),
        BLOCKED_PLUGINS: ",".join(config.plugins.block),
    }
    return LauncherContext(
        folder=folder,
        env=env,
        on_line=on_line,
        listen="127.0.0.1" if network is None else network.listen,
    )


def registry_client(loaded: Loaded) -> Registry:
    """A client of the cluster's registry, also on the host that serves it."""
    config = loaded.config.registry
    if isinstance(config, MemoryConfig) and config.address is not None:
        return RegistryClient(config.address)
    registry: Registry = loaded.host.registries.kinds[config.kind].thing(config)
    return registry


def interface_of(address: str) -> str:
    """The network interface with an IPv4 address. Raises ConfigError when none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    problem = (
        f"cluster.host.advertise: no interface has the address {address}; name the interfaces over "
        "which KV moves in runtime.kv_interfaces"
    )
    raise ConfigError([problem], "this machine")


def _is_mine(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True

"""Every option of a deployment, with its default. One YAML file fills one ``Config``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address
from typing import Any, Literal, TypeVar

import attrs
from attrs import Attribute, frozen

from commutator.contract.disagg import DisaggregationConfig, _default_router
from commutator.contract.door import FrontendConfig
from commutator.contract.engine import EngineConfig, ModelConfig
from commutator.contract.event_bus import EventBusConfig
from commutator.contract.launcher import LauncherConfig
from commutator.contract.limiter import LimiterConfig
from commutator.contract.observer import ObserverConfig
from commutator.contract.operations import OperationsConfig
from commutator.contract.planner import PlannerConfig
from commutator.contract.principal import AuthenticatorConfig
from commutator.contract.registry import RegistryConfig
from commutator.contract.routing import RouterConfig
from commutator.contract.settings import (
    Fraction,
    NonNegativeInt,
    PositiveSeconds,
    Seconds,
    Secret,
    setting,
)
from commutator.contract.tier import TierConfig
from commutator.contract.traffic import TrafficConfig
from commutator.contract.worker import Role


@frozen(kw_only=True)
class MigrationConfig:
    """What happens to a running request whose worker is lost."""

    limit: NonNegativeInt = setting(
        "How often a request that lost its worker may continue on another one; 0 lets it fail. "
        "`migration_limit` in a request can lower this.",
        1,
    )
    wait_s: Seconds = setting(
        "How long such a request waits for a worker when no other is ready, for example until the "
        "lost one was started again.",
        10.0,
    )


def _name(_: object, _field: Attribute[Any], value: str | None) -> None:
    if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", value):
        raise ValueError(f"expected letters, digits, '.', '_' and '-', got {value!r}")


def _address(_: object, attribute: Attribute[Any], value: str | None) -> None:
    try:
        if value is not None:
            ip_address(value)
    except ValueError:
        raise ValueError(f"{attribute.name}: expected an IP address, got {value!r}") from None


def _ports(_: object, _field: Attribute[Any], value: str) -> None:
    first, dash, last = value.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal()):
        raise ValueError(f"kv_ports: expected FIRST-LAST, got {value!r}")
    if not 1024 <= int(first) < int(last) <= 65535:  # noqa: PLR2004 - the ports that users have
        raise ValueError(f"kv_ports: expected 1024 <= FIRST < LAST <= 65535, got {value!r}")


@frozen(kw_only=True)
class HostConfig:
    """This host; what differs between the hosts of a cluster, beside certificates."""

    name: str | None = setting(
        "The host's name in the cluster: its workers are then HOST-ENGINE-0, HOST-ENGINE-1, ... "
        "None: as the certificate says; without one ENGINE-0, ENGINE-1, ...",
        None,
        validator=_name,
    )
    listen: str = setting(
        "The IP address at which workers listen, and publish KV events; 0.0.0.0 is every "
        "interface. Beyond this machine, `tls` is required. Doors have a `host` of their own.",
        "127.0.0.1",
        validator=_address,
    )
    advertise: str | None = setting(
        "The IP address at which other hosts reach this one; `listen` by default, if that is one.",
        None,
        validator=_address,
    )
    labels: Mapping[str, str] = setting(
        "What `commutator cluster ls` shows of the host's workers, such as {zone: a}.", {}
    )

    def __attrs_post_init__(self) -> None:
        if ip_address(self.listen).is_loopback:
            if self.advertise is not None and not ip_address(self.advertise).is_loopback:
                raise ValueError(
                    f"advertise: others cannot reach workers that listen at {self.listen}; set "
                    "listen, too"
                )
        elif self.advertise is None and ip_address(self.listen).is_unspecified:
            raise ValueError(f"advertise: required, because others cannot reach {self.listen}")
        elif self.advertise is not None and ip_address(self.advertise).is_loopback:
            raise ValueError(f"advertise: other hosts cannot reach {self.advertise}")

    @property
    def reachable_at(self) -> str:
        """The IP address at which others reach its workers."""
        return self.advertise or self.listen

    @property
    def spans_hosts(self) -> bool:
        """Whether other hosts can reach its workers."""
        return not ip_address(self.listen).is_loopback


@frozen(kw_only=True)
class ClusterTls:
    """This host's certificate, made by `commutator certs`; files that change are read again."""

    ca_file: str = setting(
        "PEM file with the authority of the cluster's certificates; with two while it is changed."
    )
    cert_file: str = setting("PEM file with this host's certificate.")
    key_file: str = setting("PEM file with the key of `cert_file`.")


@frozen(kw_only=True)
class ClusterConfig:
    """Which cluster this deployment belongs to, and this host's place in it."""

    name: str = setting("The cluster's name, as in its certificates.", "default", validator=_name)
    events: EventBusConfig = setting(
        "The event bus: how KV events get from the hosts of workers to the front doors.",
        factory=lambda: EventBusConfig(kind="zmq"),
    )
    host: HostConfig = setting("This host.", factory=HostConfig)
    tls: ClusterTls | None = setting(
        "Certificates for connections to other hosts; required once `host.listen` is not a "
        "loopback address.",
        None,
    )
    insecure: bool = setting(
        "Allow connections between hosts without TLS: everyone on the network between reads "
        "prompts and answers. Logged at each start.",
        False,
    )
    kv_network: Literal["isolated"] | None = setting(
        "`isolated` declares that nothing but this cluster reaches the network of "
        "`runtime.kv_interfaces`, where UCX, which moves KV blocks, asks nobody for a proof. "
        "Without it, KV moves inside of hosts only.",
        None,
    )
    kv_ports: str = setting(
        "The TCP ports at which UCX listens (UCX_TCP_PORT_RANGE), FIRST-LAST.",
        "20000-29999",
        validator=_ports,
    )

    def __attrs_post_init__(self) -> None:
        if self.host.spans_hosts and self.tls is None and not self.insecure:
            raise ValueError(
                f"tls: required, because workers listen at {self.host.listen}; make certificates "
                "with `commutator certs`, or allow plain text by `insecure: true`"
            )
        if self.insecure and self.tls is not None:
            raise ValueError("insecure: contradicts `tls`; remove one of them")


@frozen(kw_only=True)
class RuntimeConfig:
    """How processes are started, watched and stopped."""

    lease_s: PositiveSeconds = setting(
        "A worker that does not answer for this long gets no more requests.", 5.0
    )
    restart_backoff_s: PositiveSeconds = setting(
        "Wait before the first restart of a failed process; doubles with each failure in a row.",
        0.5,
    )
    restart_backoff_max_s: PositiveSeconds = setting("Longest wait between restarts.", 30.0)
    drain_timeout_s: Seconds = setting(
        "After SIGTERM, running requests may take this long to finish; so may those of a worker "
        "that a planner stops, which migrate then.",
        60.0,
    )
    drain_notice_s: Seconds = setting(
        "After SIGTERM, for this long `/ready` answers 503 while new requests are still served, so "
        "that load balancers send theirs elsewhere before the ports close; longer than they need "
        "to notice. Not after Ctrl-C, nor where nobody asked `/ready` within the last minute.",
        15.0,
    )
    kv_interfaces: tuple[str, ...] | None = setting(
        "The network interfaces and RDMA devices (UCX_NET_DEVICES) over which UCX moves KV blocks "
        "between processes; by default UCX_NET_DEVICES of the environment, else `lo`: this machine "
        "only. UCX lets everyone who reaches it read and write the process's memory, so name only "
        "interfaces of a network that nothing else can reach.",
        None,
    )
    secret: Secret | None = setting(
        "The passphrase from which the processes of this deployment derive the secret that they "
        "prove to each other; give other hosts the same one. By default the file named by "
        "COMMUTATOR_SECRET_FILE holds the secret, else each run makes a new one.",
        None,
    )
    state_dir: str | None = setting(
        "Folder for sockets and scratch files; a temporary one by default.", None
    )


@frozen(kw_only=True)
class LogConfig:
    """What the processes print."""

    format: Literal["text", "json"] = setting("Plain lines, or one JSON object per line.", "text")
    level: Literal["debug", "info", "warning", "error"] = setting(
        "Lowest severity that is printed.", "info", takes_effect="live"
    )


@frozen(kw_only=True)
class TracingConfig:
    """OpenTelemetry spans of requests and of their time at workers; needs commutator[tracing]."""

    endpoint: str = setting(
        "Where spans are sent, as OTLP over HTTP, such as http://HOST:4318/v1/traces."
    )
    service_name: str = setting("The service name in the spans.", "commutator")
    sample_ratio: Fraction = setting(
        "The fraction of traces to record of those that begin here; clients decide about theirs.",
        1.0,
    )


@frozen(kw_only=True)
class PluginsConfig:
    """Which installed plugins are used."""

    block: tuple[str, ...] = setting("Entry-point names of plugins not to load.", ())


@frozen(kw_only=True)
class Config:
    """A whole deployment."""

    models: tuple[ModelConfig, ...] = setting(
        "The models that clients can request.", takes_effect="workers"
    )
    engines: tuple[EngineConfig, ...] = setting(
        "The engines that serve them, each with its workers.", takes_effect="workers"
    )
    router: RouterConfig = setting(
        "How a worker is chosen.", factory=_default_router, takes_effect="new requests"
    )
    traffic: TrafficConfig | None = setting(
        "Which model serves a request: aliases, shares of versions, fall-backs; without it the one "
        "that its client names.",
        None,
        takes_effect="new requests",
    )
    disaggregation: DisaggregationConfig | None = setting(
        "When prefill and decode run on different workers; never by default.",
        None,
        takes_effect="new requests",
    )
    migration: MigrationConfig = setting(
        "What happens to a request whose worker is lost.",
        factory=MigrationConfig,
        takes_effect="new requests",
    )
    tiers: tuple[TierConfig, ...] = setting(
        "Storage tiers for KV blocks, fastest first.", (), takes_effect="workers"
    )
    observers: tuple[ObserverConfig, ...] = setting(
        "Observers of requests and workers in each front-door process.", (), takes_effect="doors"
    )
    auth: tuple[AuthenticatorConfig, ...] = setting(
        "What tells who sends a request, asked in this order; without an entry nobody is asked.",
        (),
        takes_effect="new requests",
    )
    limiter: LimiterConfig = setting(
        "What counts requests against the limits of principals: by default `ledger` where "
        "commutator-limits is installed.",
        factory=lambda: LimiterConfig(kind="unlimited"),
        takes_effect="doors",
    )
    operations: tuple[OperationsConfig, ...] | None = setting(
        "What operators see and do on the doors, beside health, metrics and administration: by "
        "default the live view and the page at /ui, `console`, and changes of what runs, "
        "`rollout`, where commutator-console and commutator-rollout are installed. A list "
        "replaces the default: name both in it, too, to keep them.",
        None,
        takes_effect="doors",
    )
    frontend: FrontendConfig = setting(
        "The front-door processes and their doors.", factory=FrontendConfig, takes_effect="doors"
    )
    runtime: RuntimeConfig = setting(
        "Processes and their supervision.", factory=RuntimeConfig, takes_effect="never"
    )
    cluster: ClusterConfig = setting(
        "Several hosts that serve together.", factory=ClusterConfig, takes_effect="never"
    )
    registry: RegistryConfig = setting(
        "The registry of workers.",
        factory=lambda: RegistryConfig(kind="memory"),
        takes_effect="never",
    )
    launcher: LauncherConfig = setting(
        "What starts the processes.",
        factory=lambda: LauncherConfig(kind="process"),
        takes_effect="never",
    )
    planner: PlannerConfig | None = setting(
        "Starts and stops workers, to latency targets; also in `commutator replay --plan`. Without "
        "it there are as many workers as `replicas` say.",
        None,
        takes_effect="never",
    )
    log: LogConfig = setting("Logging.", factory=LogConfig, takes_effect="never")
    tracing: TracingConfig | None = setting(
        "OpenTelemetry; off by default.", None, takes_effect="doors"
    )
    plugins: PluginsConfig = setting(
        "Plugin selection.", factory=PluginsConfig, takes_effect="never"
    )

    @property
    def serving_role(self) -> Role:
        """The role of the workers that answer; with a planner they have one."""
        roles = {engine.role for engine in self.engines}
        return Role.DECODE if Role.DECODE in roles else Role.BOTH

    @property
    def scales_from_zero(self) -> bool:
        """Whether requests may find no worker, and wait until the planner has started one."""
        planner = self.planner
        if planner is None or planner.mode != "act":
            return False
        fewest, most = planner.bounds.of(self.serving_role)
        return fewest == 0 and most > 0


PartT = TypeVar("PartT")


def parts_of(value: Any, wanted: type[PartT], path: str = "") -> Iterator[tuple[str, PartT]]:
    """Everything of the class ``wanted`` below ``value``, also in plugins' options, with its path.

    What is inside of a found value is not looked at.
    """
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, wanted):
        yield path, value
    elif attrs.has(type(value)):
        names = [field.name for field in attrs.fields(type(value))]
        inside = [(f"{path}.{name}" if path else name, getattr(value, name)) for name in names]
    elif isinstance(value, Mapping):
        inside = [(f"{path}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        inside = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    for inner, item in inside:
        yield from parts_of(item, wanted, inner)

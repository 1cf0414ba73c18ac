"""Core's own plugin: what one machine needs for a deployment without anything else installed."""

from __future__ import annotations

from pathlib import Path

from commutator.auth.keys import KeyAuthenticator, KeysConfig
from commutator.auth.unlimited import UnlimitedLimiter
from commutator.contract.event_bus import EventBusConfig
from commutator.contract.fairness import FairnessConfig
from commutator.contract.launcher import LauncherConfig
from commutator.contract.limiter import LimiterConfig
from commutator.contract.registration import (
    AuthenticatorRegister,
    EventBusRegister,
    FairnessRegister,
    LauncherRegister,
    LimiterRegister,
    RegistryRegister,
)
from commutator.contract.registry import Registry, RegistryConfig
from commutator.fairness import Fifo, Weighted, WeightedConfig
from commutator.hookspecs import hookimpl
from commutator.kv_events.zmq_bus import ZmqEventBus
from commutator.launcher.process import LocalLauncher
from commutator.registry.client import RegistryClient
from commutator.registry.memory import MemoryConfig, MemoryRegistry
from commutator.trust import host_and_port, network_of_this_process


def _memory(config: RegistryConfig) -> Registry:
    """The registry itself where it is served, on other hosts its client."""
    if not isinstance(config, MemoryConfig):  # the default
        return MemoryRegistry()
    network, address = network_of_this_process(), config.address
    if address is None or network is None or host_and_port(address)[0] == network.advertise:
        file = config.state_file
        return MemoryRegistry(state_file=None if file is None else Path(file))
    return RegistryClient(address)


@hookimpl
def registry_register(register: RegistryRegister) -> None:
    """Kind `memory`: leases in the supervisor's own memory, or in that of another host's."""
    register("memory", MemoryConfig, _memory, "stable")


@hookimpl
def authenticator_register(register: AuthenticatorRegister) -> None:
    """Kind `keys`: API keys, known by their hashes."""
    register("keys", KeysConfig, KeyAuthenticator, "beta")


@hookimpl
def limiter_register(register: LimiterRegister) -> None:
    """Kind `unlimited`: nobody has limits."""
    register("unlimited", LimiterConfig, lambda _: UnlimitedLimiter(), "stable")


@hookimpl
def launcher_register(register: LauncherRegister) -> None:
    """Kind `process`: child processes of the supervisor, on its machine."""
    register("process", LauncherConfig, lambda _, context: LocalLauncher(context), "stable")


@hookimpl
def event_bus_register(register: EventBusRegister) -> None:
    """Kind `zmq`: front doors read every worker's own sockets."""
    register("zmq", EventBusConfig, lambda _: ZmqEventBus(), "stable")


def _weighted(config: WeightedConfig) -> Weighted:
    return Weighted(config.generated_token_weight)


@hookimpl
def fairness_register(register: FairnessRegister) -> None:
    """Kinds `weighted`: fair shares of tokens; `fifo`: priority, then arrival."""
    register("weighted", WeightedConfig, _weighted, "beta")
    register("fifo", FairnessConfig, lambda _: Fifo(), "stable")

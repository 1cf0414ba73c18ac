"""Which host is the hub of a cluster, and what a front door does until it knows."""

from __future__ import annotations

import asyncio

import pytest

from commutator.contract.registry import RegistryConfig
from commutator.errors import RegistryError
from commutator.registry.claims import HUB
from commutator.registry.hub import Hub, hub_of
from commutator.registry.memory import MemoryConfig, MemoryRegistry
from commutator.registry.server import RegistryServer
from commutator.trust import Network

HERE, THERE = "127.0.0.1:1", "127.0.0.1:2"
NETWORK = Network("c", "h1", "10.0.0.1", "10.0.0.1")
MEMORY, SERVED = MemoryConfig(kind="memory"), MemoryConfig(kind="memory", address=THERE)
ETCD = RegistryConfig(kind="etcd")


@pytest.mark.parametrize(
    ("registry", "network", "address", "spans_hosts"),
    [
        (MEMORY, None, HERE, False),
        (ETCD, None, HERE, False),
        (MEMORY, NETWORK, HERE, False),
        (RegistryConfig(kind="memory"), NETWORK, HERE, False),
        (SERVED, NETWORK, THERE, True),
        (ETCD, NETWORK, None, True),
    ],
)
async def test_which_host_it_is(
    registry: RegistryConfig, network: Network | None, address: str | None, spans_hosts: bool
) -> None:
    hub = hub_of(registry, network, HERE)
    assert hub.spans_hosts is spans_hosts
    asking = asyncio.create_task(hub.connect(lambda _: None, lambda: None))
    if address is None:
        await asyncio.sleep(0)
        assert not asking.done()
        hub.on_claim(HUB, THERE)
    with pytest.raises(RegistryError, match=address or THERE):
        await asking


async def test_connections_to_a_former_hub_end() -> None:
    server = RegistryServer(MemoryRegistry())
    hub, lost = Hub(await server.start()), asyncio.Event()
    await hub.connect(lambda _: None, lost.set)
    hub.on_claim(HUB, THERE)
    async with asyncio.timeout(10):
        await lost.wait()
    await server.stop()

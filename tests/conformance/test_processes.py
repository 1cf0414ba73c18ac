"""The registries and launchers that come with core pass the shipped suites."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from commutator.contract.launcher import Launcher, LauncherConfig, LauncherContext
from commutator.contract.registry import Registry, RegistryConfig
from commutator.plugins import load_plugins
from commutator.registry.client import RegistryClient
from commutator.registry.server import RegistryServer
from commutator_testing.launchers import LauncherContract
from commutator_testing.registries import RegistryContract

HOST = load_plugins(found=[])


@asynccontextmanager
async def memory() -> AsyncIterator[Registry]:
    config = RegistryConfig(kind="memory")
    registry = HOST.registries.kinds[config.kind].thing(config)
    yield registry
    await registry.close()


@asynccontextmanager
async def over_tcp() -> AsyncIterator[Registry]:
    async with memory() as inner:
        server = RegistryServer(inner)
        client = RegistryClient(await server.start())
        yield client
        await client.close()
        await server.stop()


class TestMemory(RegistryContract):
    def open_registry(self) -> AbstractAsyncContextManager[Registry]:
        return memory()


class TestOverTcp(RegistryContract):
    def open_registry(self) -> AbstractAsyncContextManager[Registry]:
        return over_tcp()


class TestProcess(LauncherContract):
    def make_launcher(self, context: LauncherContext) -> Launcher:
        config = LauncherConfig(kind="process")
        return HOST.launchers.kinds[config.kind].thing(config, context)

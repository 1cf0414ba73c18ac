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


class TestMemory(RegistryContract):
    def open_registry(self) -> AbstractAsyncContextManager[Registry]:
        return memory()


class TestOverTcp(RegistryContract):
    @asynccontextmanager
    async def open_registry(self) -> AsyncIterator[Registry]:
        async with memory() as inner:
            self.server = RegistryServer(inner)
            self.address = await self.server.start()
            client = RegistryClient(self.address)
            yield client
            await client.close()
            await self.server.stop()

    @asynccontextmanager
    async def cut_off(self) -> AsyncIterator[None]:
        await self.server.stop()
        yield
        await self.server.start(port=int(self.address.rpartition(":")[2]))


class TestProcess(LauncherContract):
    def make_launcher(self, context: LauncherContext) -> Launcher:
        config = LauncherConfig(kind="process")
        launcher = HOST.launchers.kinds[config.kind].thing(config, context)
        assert isinstance(launcher, Launcher)
        return launcher

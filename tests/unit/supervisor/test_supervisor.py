"""The supervisor uses the registry and the launcher that its configuration names."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

from attrs import frozen
from tests.support.supervised import FakeEngine, FakeLauncher

from commutator.config.load import load_config
from commutator.contract.engine import EngineConfig
from commutator.contract.launcher import LauncherConfig, LauncherContext, LaunchPlan
from commutator.contract.registry import RegistryConfig
from commutator.contract.routing import RouterConfig
from commutator.contract.settings import setting
from commutator.contract.worker import WorkerRecord
from commutator.hookspecs import hookimpl
from commutator.launcher.output import Printer
from commutator.registry.memory import MemoryRegistry
from commutator.supervisor.supervisor import Supervisor

TEXT = """
models: [{name: m, source: package:m}]
engines: [{kind: still}]
registry: {kind: listed, list_name: workers}
launcher: {kind: pretend}
runtime: {state_dir: STATE}
"""


@frozen(kw_only=True)
class ListedConfig(RegistryConfig):
    list_name: str = setting("Where the list is.")


class ListedRegistry(MemoryRegistry):
    def __init__(self, config: ListedConfig) -> None:
        super().__init__()
        self.config = config
        self.registered: list[str] = []

    async def register(self, record: WorkerRecord, ttl_s: float) -> int:
        self.registered.append(record.worker_id)
        return await super().register(record, ttl_s)


class PretendLauncher(FakeLauncher):
    def __init__(self, context: LauncherContext) -> None:
        super().__init__()
        self.context = context
        self.started: list[str] = []
        self.life: list[str] = []

    async def open(self) -> None:
        self.life.append("open")

    async def start(self, name: str, plan: LaunchPlan) -> Any:
        self.started.append(name)
        return await super().start(name, plan)

    async def close(self) -> None:
        self.life.append("close")


class Plugin:
    def __init__(self) -> None:
        self.registry: ListedRegistry | None = None
        self.launcher: PretendLauncher | None = None

    @hookimpl
    def engine_register(self, register: Any) -> None:
        register("still", EngineConfig, FakeEngine(("still",)))

    @hookimpl
    def router_register(self, register: Any) -> None:
        register("round_robin", RouterConfig, lambda config: config)

    @hookimpl
    def registry_register(self, register: Any) -> None:
        register("listed", ListedConfig, self._make_registry)

    @hookimpl
    def launcher_register(self, register: Any) -> None:
        register("pretend", LauncherConfig, self._make_launcher)

    def _make_registry(self, config: ListedConfig) -> ListedRegistry:
        self.registry = ListedRegistry(config)
        return self.registry

    def _make_launcher(self, config: LauncherConfig, context: LauncherContext) -> PretendLauncher:
        self.launcher = PretendLauncher(context)
        return self.launcher


@frozen
class Point:
    """What the loader needs of an entry point."""

    name: str
    plugin: Any
    group: str = "commutator"
    value: str = "test"
    dist: None = None

    def load(self) -> Any:
        return self.plugin


async def test_another_registry_and_launcher_are_used(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(TEXT.replace("STATE", str(tmp_path)))
    plugin = Plugin()
    doors = [*entry_points(group="commutator", name="http")]
    doors += entry_points(group="commutator", name="openai")
    found = cast(list[EntryPoint], [Point("test", plugin), *doors])
    loaded = load_config([tmp_path / "c.yaml"], environ={}, found=found)
    printer = Printer("text", log=io.StringIO())
    supervisor = Supervisor(loaded, 1, printer, colour=False, url_file=None)
    running = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(30):
        while plugin.registry is None or plugin.launcher is None or not plugin.registry.registered:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0
    printer.close()
    assert plugin.registry.config.list_name == "workers"
    assert plugin.registry.registered == ["still-0"]
    assert sorted(plugin.launcher.started) == ["frontend-0", "still-0"]
    assert plugin.launcher.life == ["open", "close"]
    assert plugin.launcher.context.folder.parent == tmp_path

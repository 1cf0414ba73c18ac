"""Runs a whole deployment on one machine, from the first process to the last."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from commutator.config.load import Loaded
from commutator.config.model import Config
from commutator.config.show import effective
from commutator.config.yaml_dialect import to_yaml
from commutator.engine.process import LOG_LEVEL
from commutator.runtime.banner import banner, front_door_url
from commutator.runtime.frontend_agent import FrontendAgent
from commutator.runtime.guardian import Guardian
from commutator.runtime.output import Printer
from commutator.runtime.ports import PortPicker
from commutator.runtime.process import Launcher
from commutator.runtime.registry import MemoryRegistry
from commutator.runtime.registry_server import RegistryServer
from commutator.runtime.worker_agent import WorkerAgent, WorkerSpec

__all__ = ["Supervisor", "hand_on", "worker_specs"]

log = logging.getLogger(__name__)

_SAY_WAITING_EVERY_S = 5.0
_KILLED_AT_ONCE = 128 + signal.SIGINT


def worker_specs(loaded: Loaded) -> list[WorkerSpec]:
    """Every worker of the configuration, named ENGINE-0, ENGINE-1, ..."""
    models = {model.name: model for model in loaded.config.models}
    return [
        WorkerSpec(
            worker_id=f"{engine.name}-{replica}",
            config=engine,
            model=models[engine.model or ""],
            connector=loaded.host.engines.kinds[engine.kind].thing,
            tiers=loaded.config.tiers,
        )
        for engine in loaded.config.engines
        for replica in range(engine.replicas)
    ]


def hand_on(config: Config, port: int, file: Path) -> None:
    """Write the effective values, with the ``port`` that was found, for the front doors."""
    values = effective(config)
    values["frontend"]["port"] = port
    file.write_text(to_yaml(values))


class Supervisor:
    """One run of one deployment, on a ``port`` that is already reserved."""

    def __init__(
        self, loaded: Loaded, port: int, printer: Printer, *, colour: bool, url_file: Path | None
    ) -> None:
        self._loaded = loaded
        self._config = loaded.config
        self._port = port
        self._printer = printer
        self._colour = colour
        self._url_file = url_file
        parent = self._config.runtime.state_dir
        self._folder = Path(tempfile.mkdtemp(prefix="commutator-", dir=parent)).absolute()
        self._guardian = Guardian(self._folder)
        env = {**os.environ, LOG_LEVEL: self._config.log.level.upper()}
        self._launcher = Launcher(self._guardian, printer.line, env)
        self._workers: list[WorkerAgent] = []
        self._frontends: list[FrontendAgent] = []
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    async def run(self) -> int:
        """Until a signal ends it; returns the exit code.

        Raises ConfigError when a worker turns out to be impossible to start.
        """
        self._handle_signals()
        await self._guardian.start()
        try:
            work = asyncio.create_task(self._run_and_drain())
            killed = asyncio.create_task(_done(self._kill))
            await asyncio.wait({work, killed}, return_when=asyncio.FIRST_COMPLETED)
            if self._kill.is_set():
                self._launcher.kill_all()
                await asyncio.wait({work}, timeout=2.0)
                return _KILLED_AT_ONCE
            killed.cancel()
            await work
            return 0
        finally:
            await self._guardian.close()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_signal, True)
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, False)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, False)

    def _on_signal(self, impatient: bool) -> None:
        if not self._stop.is_set():
            log.info("stopping once running requests are finished; Ctrl-C stops at once")
            self._stop.set()
        elif impatient:
            self._kill.set()

    async def _run_and_drain(self) -> None:
        registry = MemoryRegistry()
        server = RegistryServer(registry)
        address = await server.start()
        self._make_agents(registry, address)
        workers = [asyncio.create_task(agent.run()) for agent in self._workers]
        frontends = [asyncio.create_task(agent.run()) for agent in self._frontends]
        try:
            await self._until_stopped([*workers, *frontends])
        finally:
            await _cancel(frontends)  # they finish what runs, so workers come later
            await _cancel(workers)
            await server.stop()
            await registry.close()

    def _make_agents(self, registry: MemoryRegistry, address: str) -> None:
        runtime = self._config.runtime
        ports = PortPicker()
        self._workers = [
            WorkerAgent(spec, runtime, registry, self._launcher, ports, self._folder)
            for spec in worker_specs(self._loaded)
        ]
        config_file = self._folder / "config.yaml"
        hand_on(self._config, self._port, config_file)
        env = {"COMMUTATOR_REGISTRY": address}
        self._frontends = [
            FrontendAgent(f"frontend-{number}", runtime, self._launcher, env, config_file)
            for number in range(self._config.frontend.replicas)
        ]

    async def _until_stopped(self, agents: Iterable[asyncio.Task[None]]) -> None:
        """Until a signal. An agent ends only by an error, which is raised here."""
        stopped = asyncio.create_task(_done(self._stop))
        announcing = asyncio.create_task(self._announce_when_ready())
        pending = {stopped, announcing, *agents}
        try:
            while not stopped.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await _cancel([stopped, announcing])

    async def _announce_when_ready(self) -> None:
        agents: list[WorkerAgent | FrontendAgent] = [*self._workers, *self._frontends]
        started_s = time.monotonic()
        while not all(agent.ready.is_set() for agent in agents):
            with suppress(TimeoutError):
                async with asyncio.timeout(_SAY_WAITING_EVERY_S):
                    for agent in agents:
                        await agent.ready.wait()
            if waiting := [agent.name for agent in agents if not agent.ready.is_set()]:
                waited_s = time.monotonic() - started_s
                log.info("waiting for %s (%.0f s)", ", ".join(waiting), waited_s)
        url = front_door_url(self._config, self._port)
        text = banner(self._config, url, colour=self._colour)
        self._printer.announce(text, f"ready: {url}")
        if self._url_file is not None:
            draft = self._url_file.with_suffix(".draft")
            draft.write_text(url + "\n")
            draft.replace(self._url_file)  # whoever reads it never sees half of it


async def _done(event: asyncio.Event) -> None:
    await event.wait()


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Runs a whole deployment on one machine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from attrs import evolve
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from commutator.config.load import Loaded
from commutator.config.model import Config
from commutator.config.secrets import hidden_line, variables_of_frontends, variables_of_worker
from commutator.config.show import effective
from commutator.contract.door import DoorAddress
from commutator.contract.engine import EngineConfig
from commutator.contract.event_bus import EventBus
from commutator.contract.launcher import AgentLauncher, Launcher
from commutator.contract.operations import SupervisedOperations, SupervisorContext
from commutator.contract.planner import PlannerConfig
from commutator.contract.registry import Registry
from commutator.contract.service import Service
from commutator.contract.tuning import TuningContext
from commutator.contract.worker import Role
from commutator.demand import DoorReports
from commutator.errors import ConfigError
from commutator.frontend.process import chosen_operations
from commutator.launcher.child import LOG_LEVEL
from commutator.launcher.output import Printer
from commutator.launcher.process import LocalLauncher
from commutator.plugins import PluginHost
from commutator.registry.claims import HUB, LAUNCHER, PLANNER, Claim
from commutator.registry.index_exchange import IndexExchange
from commutator.registry.memory import MemoryConfig
from commutator.registry.server import RegistryServer
from commutator.supervisor.doors import Doors
from commutator.supervisor.fleet import Agent, Fleet
from commutator.supervisor.frontend_agent import FrontendAgent
from commutator.supervisor.hosts import (
    can_be_hub,
    launcher_context,
    network_of,
    run_secret,
    serves_registry,
    those_set,
)
from commutator.supervisor.placed_fleet import PlacedFleet, PlacedWorker, agent_plan, of_agents
from commutator.supervisor.planner.loop import PlannerLoop, SteadyClock, Surroundings
from commutator.supervisor.planner.service import PlannerService
from commutator.supervisor.planner.setup import make_planner, make_tuning
from commutator.supervisor.specs import WorkerSpec, with_capacity, worker_specs
from commutator.supervisor.worker_agent import WorkerAgent
from commutator.trust import adopt, host_and_port, in_url, use_network

log = logging.getLogger(__name__)
_SAY_WAITING_AFTER_S = 5.0
_SAY_WAITING_EVERY_S = 60.0
"""At the latest: what takes long is said less and less often."""
_DOOR_SILENCE_S = 5.0
_DOOR_GONE_S = 15.0
_MOST_INTERVALS = 2.0
_SETTLE_LEASES = 3.0
"""Leases after which workers of before have registered with a registry that has just begun."""
_KILLED_AT_ONCE = 128 + signal.SIGINT


def write_effective(config: Config, port: int, file: Path) -> None:
    """Write the effective values, with the front door's ``port``, for the front doors to read.

    As JSON: with 10,000 principals each of them would otherwise read for half a minute.
    """
    values = effective(config)
    values["frontend"]["doors"][0]["port"] = port
    file.write_text(json.dumps(values))


class Supervisor:
    """One run of one deployment, on a ``port`` that is already reserved."""

    def __init__(
        self,
        loaded: Loaded,
        port: int,
        printer: Printer,
        *,
        colour: bool,
        url_file: Path | None,
        engine: str | None = None,
        front_doors: int | None = None,
    ) -> None:
        """``engine`` runs the workers of that entry only; "" none. ``front_doors`` is how many.

        By default there is everything that the configuration asks for.
        """
        self._loaded = loaded
        self._config = loaded.config
        self._port = port
        self._printer = printer
        self._colour = colour
        self._url_file = url_file
        parent = self._config.runtime.state_dir
        self._folder = Path(tempfile.mkdtemp(prefix="commutator-", dir=parent)).absolute()
        self._network = network_of(self._config)
        self._engine = engine
        self._specs = worker_specs(loaded, self._network, engine)
        self._front_doors = front_doors
        self._secret = run_secret(self._config)
        self._agents: AgentLauncher | None = None
        """Where workers are launched that are not processes of this supervisor."""
        self._launcher = self._make_launcher()
        self.is_whole = engine is None and front_doors is None
        """Whether this process runs all that the configuration asks for."""
        self.fleet: Fleet | PlacedFleet | None = None
        self.doors: Doors | None = None
        """As ``fleet``, None until it is about to run."""
        self.on_hangup: Callable[[], None] | None = None
        """Called by SIGHUP, which drains where nothing is, or once the terminal is gone."""
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        """Set once no time is left for load balancers to notice."""
        self._kill = asyncio.Event()

    @property
    def loaded(self) -> Loaded:
        """What it runs."""
        return self._loaded

    def use(self, loaded: Loaded, leaving: Sequence[EngineConfig] = ()) -> None:
        """Start workers and front doors of ``loaded`` from now on; those that run stay as they are.

        Front doors read it with the entries ``leaving``, of which workers of its models still run.
        """
        self._loaded, self._config = loaded, loaded.config
        self._specs = self.specs_of(loaded)
        logging.getLogger().setLevel(self._config.log.level.upper())
        names = {engine.name for engine in self._config.engines}
        models = {model.name for model in self._config.models}
        kept = (one for one in leaving if one.name not in names and one.model in models)
        known = (*self._config.engines, *kept)
        write_effective(evolve(self._config, engines=known), self._port, self.config_file)
        if isinstance(self.fleet, Fleet):
            self.fleet.launch_like(self._first_workers())

    def specs_of(self, loaded: Loaded) -> list[WorkerSpec]:
        """What its workers would be started from, if it ran ``loaded``."""
        return worker_specs(loaded, self._network, self._engine)

    @property
    def config_file(self) -> Path:
        """What front doors read."""
        return self._folder / "config.json"

    def prototypes(self) -> dict[str, WorkerSpec]:
        """What a worker of each engine is started from, by its name."""
        return {str(spec.config.name): spec for spec in reversed(self._specs)}

    def _make_launcher(self) -> Launcher:
        config = self._config.launcher
        context = launcher_context(
            self._config, self._network, self._folder, self._secret, self._on_line
        )
        made = self._loaded.host.launchers.kinds[config.kind].thing(config, context)
        if isinstance(made, Launcher):
            return made
        if self._specs:
            self._agents = made
        return LocalLauncher(context)

    def _on_line(self, process: str, stream: str, line: str) -> None:
        self._printer.line(process, stream, hidden_line(line))

    async def run(self) -> int:
        """Run the deployment until a signal ends it; returns the exit code.

        Raises ConfigError when the first start of a worker shows that it can never start.
        """
        with adopt(self._secret), use_network(self._network):
            return await self._run()

    async def _run(self) -> int:
        self._handle_signals()
        await self._launcher.open()
        try:
            work = asyncio.create_task(self._run_and_drain())
            killed = asyncio.create_task(self._kill.wait())
            await asyncio.wait({work, killed}, return_when=asyncio.FIRST_COMPLETED)
            if self._kill.is_set():
                self._launcher.kill_all()
                await asyncio.wait({work}, timeout=2.0)
                return _KILLED_AT_ONCE
            killed.cancel()
            await work
            log.info("Stopped.")
            return 0
        finally:
            await self._launcher.close()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_signal, True)
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, False)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup, _has_terminal())

    def _on_hangup(self, had_terminal: bool) -> None:
        if self.on_hangup is None or (had_terminal and not _has_terminal()):
            self._on_signal(False)
        else:
            self.on_hangup()

    def _on_signal(self, impatient: bool) -> None:
        if not self._stop.is_set():
            log.info(
                "Stopping; requests that run may take %g s more. Press Ctrl-C again to end them.",
                self._config.runtime.drain_timeout_s,
            )
            self._stop.set()
            if impatient:
                self._hurry.set()
        elif impatient:
            self._kill.set()
        else:
            self._hurry.set()

    async def _run_and_drain(self) -> None:
        if self._agents is not None:
            await self._agents.open()
        config = self._config.registry
        registry = self._loaded.host.registries.kinds[config.kind].thing(config)
        services = [*self._ledger(), *[service async for service in self._operations(registry)]]
        server = RegistryServer(registry)
        address = await server.start()
        events = self._config.cluster.events
        bus = self._loaded.host.event_buses.kinds[events.kind].thing(events)
        planner = self._config.planner
        clock: Callable[[], float] = time.monotonic
        reports = None
        if planner is not None:
            clock = SteadyClock(most_s=_MOST_INTERVALS * planner.interval_s)
            reports = DoorReports(silence_s=_DOOR_SILENCE_S, gone_s=_DOOR_GONE_S)
        fleet, placing = self._make_workers(registry, address, clock, reports, bus)
        self.fleet = fleet
        server.unready = fleet.unready
        claiming: list[asyncio.Task[None]] = []
        if planner is not None and reports is not None and isinstance(fleet, Fleet):
            claim = self._claim(PLANNER, address, registry)
            services.append(self._plan(planner, fleet, reports, clock, claim))
            claiming = [asyncio.create_task(claim.run())]
        server.serve(services)
        shared, hub_claim = await self._share(registry, services)
        claiming += hub_claim
        serving = [asyncio.create_task(service.run()) for service in services]
        doors = self.doors = self._begin_doors(address)
        if isinstance(fleet, Fleet):
            fleet.begin(self._first_workers())
        workers = asyncio.create_task(fleet.run())
        frontends = asyncio.create_task(doors.run())
        try:
            await self._until_stopped([workers, frontends, *serving, *claiming, *placing])
            await self._give_notice()
        finally:
            await _cancel([*serving, *claiming])
            await _cancel([frontends])  # first, as their running requests need the workers
            await _cancel([workers])
            await _cancel(placing)
            if self._agents is not None:
                await self._agents.close()
                log.info("the workers stay where they run; `commutator down` stops them")
            await bus.close()
            await server.stop()
            if shared is not None:
                await shared.stop()
            for service in services:
                await service.stop()
            await registry.close()

    async def _operations(self, registry: Registry) -> AsyncIterator[Service]:
        """The parts of operations that run beside a supervisor."""
        host, context = self._loaded.host, SupervisorContext(supervisor=self, registry=registry)
        for config in chosen_operations(host, self._config.operations):
            made = host.operations.kinds[config.kind].thing
            if isinstance(made, SupervisedOperations):
                yield await made.beside(config, context)

    def _ledger(self) -> list[Service]:
        """What counts requests against limits, where something does."""
        config = self._config.limiter
        ledger = self._loaded.host.limiters.kinds[config.kind].thing(config).service()
        return [] if ledger is None else [ledger]

    def _claim(self, name: str, address: str, registry: Registry) -> Claim:
        """A claim of this host to do what ``name`` says, for all of the cluster."""
        host = self._config.cluster.host.name or ""
        return Claim(name, address, registry, self._config.runtime.lease_s, host=host)

    def _plan(
        self,
        planner: PlannerConfig,
        fleet: Fleet,
        reports: DoorReports,
        clock: Callable[[], float],
        claim: Claim,
    ) -> PlannerService:
        around = Surroundings(fleet=fleet, reports=reports, may_act=lambda: claim.held, clock=clock)
        context = TuningContext(
            config=self._config, launcher=self._launcher, folder=self._folder / "tuning"
        )
        made = make_planner(self._config, planner, self._loaded.host)
        tuning = make_tuning(planner, self._loaded.host, context)
        return PlannerService(PlannerLoop(made, around, tuning))

    async def _share(
        self, registry: Registry, services: Iterable[Service]
    ) -> tuple[RegistryServer | None, list[asyncio.Task[None]]]:
        """Serve other hosts what this one has for them: the registry, or what front doors share.

        The tasks hold the claim of the hub. Raises ConfigError.
        """
        network = self._network
        place = serves_registry(self._config, network)
        if network is None or (place is None and not can_be_hub(self._config, network)):
            return None, []
        shared = RegistryServer(registry, [*services, IndexExchange()])
        host, port = place or (network.listen, 0)
        try:
            address = await shared.start(host, port)
        except OSError as error:
            problem = f"registry.address: cannot listen at {host}:{port}: {error.strerror}"
            raise ConfigError([problem], "this machine") from error
        if place is not None:
            return shared, []
        port = host_and_port(address)[1]
        address = f"{in_url(network.advertise)}:{port}"
        claim = Claim(HUB, address, registry, self._config.runtime.lease_s, host=network.host)
        return shared, [asyncio.create_task(claim.run())]

    def _first_workers(self) -> list[WorkerSpec]:
        """The first workers. With a planner an engine must be able to have as many as the plan."""
        planner = self._config.planner
        if planner is None or planner.mode != "act":
            return self._specs
        bounds = planner.bounds
        return [with_capacity(one, bounds.of(Role(one.config.role))[1]) for one in self._specs]

    def _make_workers(
        self,
        registry: Registry,
        address: str,
        clock: Callable[[], float],
        reports: DoorReports | None,
        bus: EventBus,
    ) -> tuple[Fleet | PlacedFleet, list[asyncio.Task[None]]]:
        """The fleet; the task of one on other hosts holds the claim to launch."""
        if self._agents is not None:
            return self._place_workers(self._agents, registry, address)
        runtime = self._config.runtime

        def make_agent(spec: WorkerSpec) -> WorkerAgent:
            return WorkerAgent(
                spec,
                runtime,
                registry,
                self._launcher,
                self._folder,
                {
                    **those_set(variables_of_worker(self._config, spec.config)),
                    LOG_LEVEL: self._config.log.level.upper(),
                },
                bus=bus,
            )

        fleet = Fleet(
            registry, make_agent, clock, drain_timeout_s=runtime.drain_timeout_s, in_flight=reports
        )
        return fleet, []

    def _place_workers(
        self, launcher: AgentLauncher, registry: Registry, address: str
    ) -> tuple[PlacedFleet, list[asyncio.Task[None]]]:
        """The fleet on the hosts of a launcher of agents; the task holds the claim to launch."""
        options = of_agents(self._config)
        assert options is not None
        workers = [PlacedWorker(agent_plan(self._loaded, options, one), one) for one in self._specs]
        if isinstance(self._config.registry, MemoryConfig):
            # This process is the registry, so nobody else launches.
            settle_s = _SETTLE_LEASES * self._config.runtime.lease_s
            return PlacedFleet(launcher, registry, workers, lambda: True, settle_s=settle_s), []
        claim = self._claim(LAUNCHER, address, registry)
        fleet = PlacedFleet(launcher, registry, workers, lambda: claim.held)
        return fleet, [asyncio.create_task(claim.run())]

    def _begin_doors(self, address: str) -> Doors:
        write_effective(self._config, self._port, self.config_file)
        doors = Doors(lambda name: self._make_frontend(name, address))
        count = self._front_doors
        doors.begin(self._config.frontend.replicas if count is None else count)
        return doors

    def _make_frontend(self, name: str, address: str) -> FrontendAgent:
        secrets = those_set(variables_of_frontends(self._config))
        env = {**secrets, LOG_LEVEL: self._config.log.level.upper(), "COMMUTATOR_REGISTRY": address}
        return FrontendAgent(name, self._config.runtime, self._launcher, env, self.config_file)

    async def _until_stopped(self, agents: Iterable[asyncio.Task[None]]) -> None:
        """Wait for a signal. Raises the error of an agent, which ends only by an error."""
        stopped = asyncio.create_task(self._stop.wait())
        announcing = asyncio.create_task(self._announce_when_ready())
        pending: set[asyncio.Task[Any]] = {stopped, announcing, *agents}
        try:
            while not stopped.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await _cancel([stopped, announcing])

    async def _give_notice(self) -> None:
        """Serve on until load balancers, if there are any, have seen that this host leaves."""
        notice_s = self._config.runtime.drain_notice_s
        if self._hurry.is_set() or not notice_s:
            return
        if any(await asyncio.gather(*(door.leave() for door in self._doors()))):
            log.info("/ready says 503; new requests are served for %g s more", notice_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(notice_s):
                    await self._hurry.wait()

    async def _announce_when_ready(self) -> None:
        started_s = time.monotonic()
        pause_s = _SAY_WAITING_AFTER_S
        while self._not_ready():
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    for agent in self._all():
                        await agent.ready.wait()
            if waiting := self._not_ready():
                waited_s = time.monotonic() - started_s
                here = {engine.model for engine in self._config.engines}
                lacking = [m.name for m in self._config.models if m.name not in here]
                why = f"; no engine of this file serves {', '.join(lacking)}" if lacking else ""
                log.info("waiting for %s (%.0f s)%s", ", ".join(waiting), waited_s, why)
                pause_s = min(2 * pause_s, _SAY_WAITING_EVERY_S)
        if not self._doors():
            names = ", ".join(agent.name for agent in self._all())
            self._printer.announce(f"Ready: {names}", f"ready: {names}")
            return
        address = front_door_address(self._config, self._loaded.host, self._port)
        url = address.url
        text = banner(self._config, address, colour=self._colour)
        self._printer.announce(text, f"ready: {url}")
        if self._url_file is not None:
            draft = self._url_file.with_suffix(".draft")
            draft.write_text(url + "\n")
            draft.replace(self._url_file)  # atomically, so that no reader finds half of it

    def _not_ready(self) -> list[str]:
        return [agent.name for agent in self._all() if not agent.ready.is_set()]

    def _all(self) -> list[Agent | PlacedWorker | FrontendAgent]:
        """Everything that is to run now."""
        assert self.fleet is not None
        return [*self.fleet.agents(), *self._doors()]

    def _doors(self) -> list[FrontendAgent]:
        return [] if self.doors is None else self.doors.agents()


def _has_terminal() -> bool:
    """Whether this process belongs to a terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def front_door_address(config: Config, host: PluginHost, port: int) -> DoorAddress:
    """How clients on this machine reach the front door."""
    door = config.frontend.door
    name = door.host
    try:
        address = ip_address(name)
    except ValueError:
        pass
    else:
        if address.is_unspecified:
            name = "127.0.0.1" if address.version == 4 else "::1"  # noqa: PLR2004
        name = f"[{name}]" if ":" in name else name
    example = None
    if door.protocols:
        protocol = host.protocols.kinds[door.protocols[0].kind].thing
        example = protocol.example("", config.models[0].name)
    return host.doors.kinds[door.kind].thing.address(door, f"{name}:{port}", example)


def _invitation(config: Config, address: DoorAddress) -> str:
    if not config.auth or "Authorization" in address.example:
        return "Try it:"
    return "Try it, and add the key of a principal, -H 'Authorization: Bearer KEY':"


def banner(config: Config, address: DoorAddress, *, colour: bool) -> str:
    """A box with the address, the models and the workers, then a command to try."""
    console = Console(color_system="standard" if colour else None, force_terminal=colour)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("engine", "kind", "model", "workers"):
        table.add_column(column, justify="right" if column == "workers" else "left")
    for engine in config.engines:
        name = engine.name or engine.kind
        cells = (name, engine.kind, engine.model or "", str(engine.replicas))
        table.add_row(*map(Text, cells))  # a name may look like markup
    ready = Text.assemble(("Ready:", "bold green"), " ", (address.api_url, "bold"))
    content = Group(ready, "", table)
    with console.capture() as captured:
        console.print(Panel(content, title="Commutator", title_align="left", expand=False))
        console.print(_invitation(config, address), style="dim")
        console.print(Text(address.example), soft_wrap=True)
    return captured.get()

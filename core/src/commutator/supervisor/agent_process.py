"""An agent: runs one worker on the host where a launcher of agents has placed it.

``python -m commutator.supervisor.agent_process FOLDER ADDRESS CONTROL``, as ``AgentPlan`` says. For
a worker over several nodes there is one on each, for as long as all of them run; only that of rank
0 knows the registry. SIGINT ends an agent without a drain.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from commutator.config.load import Loaded, load_config
from commutator.config.secrets import hidden_line, variables_of_worker
from commutator.contract.engine import LaunchContext, NodeGroup
from commutator.contract.registry import RETIRED, Registry
from commutator.errors import CommutatorError, ConfigError, EngineError, RegistryError
from commutator.launcher.child import (
    GROUP,
    StartFailure,
    raise_descriptor_limit,
    report_start_failure,
    take_start_failure,
)
from commutator.launcher.process import LocalLauncher
from commutator.supervisor.hosts import (
    interface_of,
    launcher_context,
    network_of,
    registry_client,
    run_secret,
    those_set,
)
from commutator.supervisor.preflight import check_machine, fetch_models, machine_warnings
from commutator.supervisor.specs import WorkerSpec, worker_spec
from commutator.supervisor.worker_agent import WorkerAgent
from commutator.trust import adopt, use_network

log = logging.getLogger("commutator.supervisor.agent_process")  # not "__main__"

CONFIG, ORDER = "config.json", "order.json"
"""The agent's files: effective values of the configuration, and an ``Order``."""

_LOOK_S = 0.5
_ANSWER_S = 2.0
"""Longest wait for a TCP connection to the launcher's cluster."""
_SETTLE_S = 10.0
"""After it can be reached again: it may say first that this host was replaced."""
_IDLE_LOOKS = 3
_RANK_GRACE_S = 10.0


@frozen(kw_only=True)
class Order:
    """What an agent is to run."""

    engine: str
    """The name of the `engines` entry."""
    number: int
    """Of the replica."""
    generation: str
    """As ``WorkerRecord.generation``."""
    cut_off_s: float
    """As ``AgentLauncherConfig.cut_off_s``."""
    working_folder: str
    """Relative paths of the configuration begin there, on each host."""


class CutOff:
    """Tells when a host has reached nobody for too long. Pure: it is told the time."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        """At ``now_s`` both can be reached."""
        self._limit_s = limit_s
        self._answered_s = {"registry": now_s, "control": now_s}
        self._lost: set[str] = set()

    def saw(self, side: str, answered: bool, now_s: float) -> None:
        """The ``registry``, or the launcher's cluster (``control``), answered, or did not."""
        if answered:
            self._answered_s[side] = now_s
            self._lost.discard(side)
        else:
            self._lost.add(side)

    @property
    def suspects(self) -> bool:
        """Whether the registry did not answer last: only then the other one has to be asked."""
        return "registry" in self._lost

    def is_cut_off(self, now_s: float) -> bool:
        """Whether neither has answered for the limit, and neither did last."""
        silent_s = now_s - max(self._answered_s.values())
        return len(self._lost) == len(self._answered_s) and silent_s >= self._limit_s


class _Host:
    """One worker on this host, until SIGTERM."""

    def __init__(
        self, loaded: Loaded, order: Order, control: str, group: NodeGroup | None = None
    ) -> None:
        self._loaded = loaded
        self._config = loaded.config
        self._order = order
        self._group = group
        parent = self._config.runtime.state_dir
        self._folder = Path(tempfile.mkdtemp(prefix="commutator-", dir=parent)).absolute()
        self._control = control
        self._network = network_of(self._config)
        self._secret = run_secret(self._config)
        self._stop = asyncio.Event()
        self._parent = os.getppid()
        self._cut_off = CutOff(order.cut_off_s, time.monotonic())

    def _registry_answered(self, answered: bool) -> None:
        self._cut_off.saw("registry", answered, time.monotonic())

    async def run(self) -> None:
        """Run the worker until SIGTERM; then drain it. Raises ConfigError if it can never start."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop.set)
        (engine,) = self._config.engines
        network, order = self._network, self._order
        host = "" if network is None else network.host
        spec = worker_spec(self._loaded, engine, order.number, network, host)
        spec = evolve(spec, generation=order.generation, group=self._group)
        launcher = LocalLauncher(
            launcher_context(self._config, network, self._folder, self._secret, _print_line)
        )
        if self._group is not None and self._group.rank > 0:
            await self._run_rank(launcher, spec)
            return
        events = self._config.cluster.events
        bus = self._loaded.host.event_buses.kinds[events.kind].thing(events)
        registry = registry_client(self._loaded)
        await launcher.open()
        try:
            while not self._stop.is_set():
                env = self._variables(spec)
                agent = WorkerAgent(
                    spec,
                    self._config.runtime,
                    registry,
                    launcher,
                    self._folder,
                    env,
                    bus=bus,
                    on_answer=self._registry_answered,
                )
                await self._live(agent, registry)
        finally:
            await bus.close()
            await launcher.close()
            await registry.close()

    def _variables(self, spec: WorkerSpec) -> dict[str, str]:
        """What the worker gets beside its plan's own variables."""
        found = those_set(variables_of_worker(self._config, spec.config))
        if self._group is not None:
            # PyTorch's backends would listen at the address of the machine's name.
            interface = interface_of(spec.kv_host)
            found |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        return found

    async def _run_rank(self, launcher: LocalLauncher, spec: WorkerSpec) -> None:
        """Run the process of a rank above 0 until SIGTERM. Raises CommutatorError if it ends."""
        await launcher.open()
        try:
            host, port = launcher.listen_at(loopback=True)
            plan = spec.connector.launch_plan(
                spec.config,
                LaunchContext(
                    worker_id=spec.worker_id,
                    model=spec.model,
                    host=host,
                    port=port,
                    state_dir=self._folder,
                    advertise=host,
                    kv_host=spec.kv_host,
                    group=spec.group,
                ),
            )
            assert plan is not None
            plan = evolve(plan, env={**self._variables(spec), **plan.env})
            process = await launcher.start(f"{spec.worker_id}-rank", plan)
            ended = asyncio.create_task(process.wait())
            stopped = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopped.cancel()
                await process.stop(_RANK_GRACE_S)
            if self._stop.is_set():
                return
            failure = take_start_failure(self._folder)
            if failure is not None and failure.is_permanent:
                raise ConfigError(list(failure.problems), f"worker {spec.worker_id}")
            assert spec.group is not None
            raise EngineError(f"rank {spec.group.rank} of {spec.worker_id} {await ended}")
        finally:
            await launcher.close()

    async def _live(self, agent: WorkerAgent, registry: Registry) -> None:
        """Run the worker until SIGTERM, or until this host is cut off; then until it is not."""
        running = asyncio.create_task(agent.run())
        stopped = asyncio.create_task(self._stop.wait())
        lost = asyncio.create_task(self._until_cut_off())
        try:
            await asyncio.wait({running, stopped, lost}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            if stopped.done():
                await self._drain(agent, registry)
        finally:
            for task in (running, stopped, lost):
                task.cancel()
            await asyncio.gather(running, stopped, lost, return_exceptions=True)
        if not self._stop.is_set():
            if self._group is not None:
                raise EngineError(f"the host of rank 0 of {agent.name} is cut off")
            log.error(
                "%s was stopped: for %g s its host has reached neither the registry nor %s, so "
                "another host may have replaced it; it is started again when they can be reached",
                agent.name,
                self._order.cut_off_s,
                self._control,
            )
            await self._until_connected()

    async def _drain(self, agent: WorkerAgent, registry: Registry) -> None:
        """Let its requests end; it then retires, so that draining ends with it."""
        agent.leaving = RETIRED
        if self._is_orphan:
            return
        try:
            if not await registry.set_draining(agent.name, True):
                return
        except RegistryError as error:
            log.warning("%s is stopped without a drain: %s", agent.name, error)
            return
        idle = 0
        with suppress(TimeoutError, CommutatorError):
            async with asyncio.timeout(self._config.runtime.drain_timeout_s):
                # A parent that dies is gone some time after its guard has sent SIGTERM.
                while idle < _IDLE_LOOKS and not self._is_orphan:
                    await asyncio.sleep(_LOOK_S / 2)
                    load = await agent.load()
                    idle = 0 if load is not None and load.running + load.waiting else idle + 1

    @property
    def _is_orphan(self) -> bool:
        """Whether the guard asks this process to end, and kills it soon."""
        return os.getppid() != self._parent

    async def _until_cut_off(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._cut_off.suspects:
                answered = await _answers(self._control)
                self._cut_off.saw("control", answered, time.monotonic())
                if self._cut_off.is_cut_off(time.monotonic()):
                    return

    async def _until_connected(self) -> None:
        while not self._stop.is_set():
            if await _answers(self._control):
                break
            await asyncio.sleep(_LOOK_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                await self._stop.wait()
        self._cut_off = CutOff(self._order.cut_off_s, time.monotonic())

    async def main(self) -> None:
        """``run``, as a process of this deployment."""
        with adopt(self._secret), use_network(self._network):
            await self.run()


async def _answers(address: str) -> bool:
    """Whether a TCP connection shows that a host is not cut off: it may also be refused."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True  # by that host's kernel: only the program there is gone
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True


def _print_line(process: str, stream: str, line: str) -> None:
    del process, stream
    sys.stdout.write(hidden_line(line) + "\n")
    sys.stdout.flush()


def at_address(values: dict[str, Any], address: str) -> dict[str, Any]:
    """Values of a configuration for the host at ``address``. Raises ConfigError.

    With TLS its certificate names the host; without, its address does.
    """
    cluster = values["cluster"]
    host = cluster["host"]
    spans_hosts = not ip_address(host["listen"]).is_loopback
    if not spans_hosts and not ip_address(address).is_loopback:
        problem = (
            f"cluster.host.listen: {host['listen']}, but this worker was placed on the host "
            f"{address}, where others could not reach it; set it to an address of the host that "
            "runs `commutator serve`"
        )
        raise ConfigError([problem], f"host {address}")
    if not spans_hosts:
        return values
    name = None if cluster["tls"] is not None else address.replace(":", "-")
    here = {**host, "listen": address, "advertise": address, "name": name}
    return {**values, "cluster": {**cluster, "host": here}}


def _load(folder: Path, order: Order, address: str) -> Loaded:
    """The configuration of one worker on this host. Raises CommutatorError."""
    values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    file = folder / "here.json"
    file.write_text(json.dumps(at_address(values, address)), encoding="utf-8")
    loaded = load_config([file], environ={})
    config = loaded.config
    engine = next(one for one in config.engines if one.name == order.engine)
    here = evolve(
        config,
        engines=(evolve(engine, replicas=1),),
        models=tuple(model for model in config.models if model.name == engine.model),
    )
    fetch_models(here)
    check_machine(here, loaded.host, front_doors=False)
    for warning in machine_warnings(here, loaded.host):
        log.warning("%s", warning)
    return evolve(loaded, config=here)


def _group(folder: Path) -> NodeGroup | None:
    try:
        return NodeGroup(**json.loads((folder / GROUP).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def main() -> None:
    folder, address, control = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    order = Order(**json.loads((folder / ORDER).read_text(encoding="utf-8")))
    try:
        logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
        with suppress(OSError):  # what is not there is reported by the name that needs it
            os.chdir(order.working_folder)
        loaded = _load(folder, order, address)
        logging.getLogger().setLevel(loaded.config.log.level.upper())
        if (nice := os.nice(0)) > 0:
            log.warning("this host runs workers with niceness %d: they get CPU time after others; "
                        "with Ray, set RAY_worker_niceness=0 for `ray start`", nice)  # fmt: skip
        raise_descriptor_limit()
        asyncio.run(_Host(loaded, order, control, _group(folder)).main())
    except KeyboardInterrupt:
        sys.exit("ended without a drain")
    except ConfigError as error:
        problems = [f"host {address}: {problem}" for problem in error.problems]
        report_start_failure(folder, StartFailure(problems=problems, is_permanent=True))
        sys.exit(f"ERROR {error}")
    except CommutatorError as error:
        sys.exit(f"ERROR {error}")


if __name__ == "__main__":
    main()

"""The workers of a deployment whose launcher places agents on hosts of a cluster.

``reconcile`` decides, ``PlacedFleet`` carries it out. Nothing is remembered: what runs is asked of
the launcher, and who is ready of the registry, so another process can take over at any time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from commutator.config.load import Loaded
from commutator.config.model import Config
from commutator.config.show import effective
from commutator.contract.launcher import (
    AgentLauncher,
    AgentLauncherConfig,
    AgentPlan,
    AgentState,
    PlacedAgent,
)
from commutator.contract.registry import Registry, WorkerUp
from commutator.contract.worker import Role, WorkerRecord
from commutator.errors import ConfigError, LauncherError
from commutator.registry.claims import workers_only
from commutator.registry.unready import UnreadyState, UnreadyWorker
from commutator.supervisor import agent_process
from commutator.supervisor.agent_process import CONFIG, ORDER, Order
from commutator.supervisor.specs import WorkerSpec

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_PLACE_AGAIN_S = 30.0
"""After a host on which a worker could not start, though others of its engine could elsewhere."""
_EXIT_S = 20.0
"""Seconds that an agent may take to end after its worker's last request."""
_SECTIONS = (
    "models", "engines", "tiers", "disaggregation", "cluster", "registry", "runtime", "log",
    "plugins", "launcher",
)  # fmt: skip
"""What an agent needs of a configuration."""


@frozen
class Place:
    """Place an agent that is missing."""

    plan: AgentPlan


@frozen
class Remove:
    """End an agent that nobody wants, is of another generation, or was asked to end before."""

    name: str


@frozen
class Failed:
    """End an agent that can never start, and say why."""

    name: str
    cause: str


Action = Place | Remove | Failed


def reconcile(
    wanted: Mapping[str, AgentPlan],
    found: Sequence[PlacedAgent],
    ready: Collection[str],
    busy: Collection[str] = (),
) -> Iterator[Action]:
    """What is to be done next, for agents by name. Pure.

    ``ready``: the agents whose workers are in the registry. ``busy``: those that something is being
    done about, which are left alone. Of each engine one ready worker at a time is replaced by one
    of another generation, once all others are ready.
    """
    there = {agent.name: agent for agent in found}
    unready = [
        name
        for name, plan in wanted.items()
        if name not in ready
        or name in busy
        or name not in there
        or there[name].state in (AgentState.FAILED, AgentState.ENDING)
    ]
    engines_waiting = {wanted[name].engine for name in unready}
    for agent in found:
        plan = wanted.get(agent.name)
        if agent.name in busy:
            continue
        if plan is None:
            yield Remove(agent.name)
        elif agent.generation != plan.generation or agent.state is AgentState.ENDING:
            if agent.name in unready:
                yield Remove(agent.name)
            elif plan.engine not in engines_waiting:
                engines_waiting.add(plan.engine)
                yield Remove(agent.name)
        elif agent.state is AgentState.FAILED:
            yield Failed(agent.name, agent.cause or "it cannot start")
    for name, plan in wanted.items():
        if name not in there and name not in busy:
            yield Place(plan)


def place_of(record: WorkerRecord) -> str:
    """The name of the agent that runs a worker, whatever its host."""
    return f"{record.engine}-{record.worker_id.rpartition('-')[2]}"


def agent_plan(loaded: Loaded, launcher: AgentLauncherConfig, spec: WorkerSpec) -> AgentPlan:
    """The agent for a worker of the configuration, on whichever host."""
    config = loaded.config
    engine = spec.config.name or spec.config.kind
    order = Order(
        engine=engine,
        number=int(spec.worker_id.rpartition("-")[2]),
        generation=spec.generation,
        cut_off_s=launcher.cut_off_s,
        working_folder=str(Path.cwd()),
    )
    values = {name: value for name, value in effective(config).items() if name in _SECTIONS}
    return AgentPlan(
        name=f"{order.engine}-{order.number}",
        engine=order.engine,
        generation=_generation(values, order, spec, asdict(launcher)),
        module=agent_process.__name__,
        files={CONFIG: json.dumps(values), ORDER: json.dumps(asdict(order))},
        grace_s=config.runtime.drain_timeout_s + _EXIT_S,
        nodes=spec.config.nodes,
    )


def _generation(
    values: Mapping[str, Any], order: Order, spec: WorkerSpec, launcher: Mapping[str, Any]
) -> str:
    """A digest of what changes this agent: not of other engines, nor of the launching host."""
    of_launcher = dict(launcher)
    resources = of_launcher.get("resources")
    if isinstance(resources, Mapping):
        of_launcher["resources"] = resources.get(order.engine)
    of_launcher.pop("address", None)  # how the launching host reaches the cluster
    cluster = {**values["cluster"], "host": values["cluster"]["host"]["labels"]}
    kept = [values[name] for name in ("tiers", "registry", "runtime", "log", "plugins")]
    text = json.dumps([spec.generation, cluster, kept, of_launcher], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class PlacedWorker:
    """One worker, wherever it runs."""

    def __init__(self, plan: AgentPlan, spec: WorkerSpec) -> None:
        self.name = plan.name
        self.plan = plan
        self.ready = asyncio.Event()
        """Set while it is in the registry."""
        self._spec = spec
        self._began_unix_s = time.time()
        self.was_ready = False
        """Whether it has ever been in the registry during this run."""
        self._seen: PlacedAgent | None = None

    def up(self) -> None:
        """It is in the registry."""
        self.was_ready = True
        self.ready.set()

    def down(self) -> None:
        """It has left the registry."""
        self._began_unix_s = time.time()
        self.ready.clear()

    def seen(self, agent: PlacedAgent | None) -> None:
        """What the launcher knows of it; None: nothing."""
        self._seen = agent

    @property
    def unready(self) -> UnreadyWorker | None:
        """Why it is not in the registry; None while it is."""
        if self.ready.is_set():
            return None
        agent, config = self._seen, self._spec.config
        state = UnreadyState.DEAD if self.was_ready else UnreadyState.STARTING
        cause = None if agent is None else agent.cause
        ended = agent is not None and agent.state in (AgentState.RUNNING, AgentState.FAILED)
        if ended and cause is not None:
            state = UnreadyState.DEAD if self.was_ready else UnreadyState.FAILING
        return UnreadyWorker(
            worker_id=self.name,
            model=self._spec.model.name,
            kind=config.kind,
            engine=self.plan.engine,
            role=Role(config.role),
            host="" if agent is None else agent.host,
            state=state,
            since_unix_s=self._began_unix_s,
            cause=cause,
        )


class PlacedFleet:
    """Keeps the agents of a deployment as the configuration wants them. Used from one event loop.

    ``run`` leaves them running when it is cancelled.
    """

    def __init__(
        self,
        launcher: AgentLauncher,
        registry: Registry,
        workers: Sequence[PlacedWorker],
        acts: Callable[[], bool],
        *,
        settle_s: float = 0.0,
        look_s: float = _LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``acts``: whether this process is the one that places and ends agents now.

        For ``settle_s`` none is replaced: a registry that has just begun does not know yet which
        workers are ready.
        """
        self._launcher = launcher
        self._registry = registry
        self._workers = {worker.name: worker for worker in workers}
        self._acts = acts
        self._look_s = look_s
        self._records: dict[str, str] = {}
        """The agent of each worker in the registry, by worker id."""
        self._view_known = asyncio.Event()
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._clock = clock
        self._replaces_from_s = clock() + settle_s
        self._failed: dict[str, tuple[str, float]] = {}
        """Why an agent could not start, and when another try is due."""
        self._problem = ""

    def agents(self) -> list[PlacedWorker]:
        """Every worker that is wanted."""
        return list(self._workers.values())

    def unready(self) -> list[UnreadyWorker]:
        """The workers that are not in the registry, ordered by id."""
        found = [worker.unready for worker in self._workers.values()]
        return sorted((one for one in found if one is not None), key=lambda one: one.worker_id)

    async def run(self) -> None:
        """Reconcile until cancelled.

        Raises ConfigError when no worker of an engine has been ready, and one can never start.
        """
        following = asyncio.create_task(self._follow())
        try:
            # Without it, ready workers would be taken for others that may be replaced at once.
            await self._view_known.wait()
            while True:
                if self._acts():
                    await self._reconcile()
                await asyncio.sleep(self._look_s)
        finally:
            tasks = [following, *self._busy.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _found(self) -> Sequence[PlacedAgent] | None:
        """The agents that there are; None when the launcher cannot be asked."""
        try:
            found = await self._launcher.agents()
        except LauncherError as error:
            self._say(f"workers are neither started nor stopped: {error}")
            return None
        if self._problem:
            log.info("workers are started and stopped again")
            self._problem = ""
        return found

    async def _reconcile(self) -> None:
        found = await self._found()
        if found is None or not self._acts():
            return  # the answer may take so long that another process may act now
        by_name = {agent.name: agent for agent in found}
        for name, worker in self._workers.items():
            worker.seen(by_name.get(name))
        wanted = {name: worker.plan for name, worker in self._workers.items()}
        ready = {name for name, worker in self._workers.items() if worker.ready.is_set()}
        for action in reconcile(wanted, found, ready, self._busy):
            match action:
                case Place(plan):
                    if self._may_place(plan):
                        self._begin(plan.name, self._place(plan))
                case Remove(name):
                    if name not in wanted or self._clock() >= self._replaces_from_s:
                        self._begin(name, self._remove(name))
                case Failed(name, cause):
                    self._failed[name] = (cause, self._clock() + _PLACE_AGAIN_S)
                    self._begin(name, self._remove(name))

    def _may_place(self, plan: AgentPlan) -> bool:
        """Whether a worker may be tried now that may have failed before. Raises ConfigError."""
        cause, again_s = self._failed.get(plan.name, ("", 0.0))
        if not cause:
            return True
        others = [one for one in self._workers.values() if one.plan.engine == plan.engine]
        if not any(one.was_ready for one in others):
            raise ConfigError([cause], f"worker {plan.name}")
        if self._clock() < again_s:
            return False
        log.error("%s could not start, and is placed again: %s", plan.name, cause)
        del self._failed[plan.name]
        return True

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._busy[name] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._busy.pop(name, None))

    async def _place(self, plan: AgentPlan) -> None:
        try:
            await self._launcher.place(plan)
        except LauncherError as error:
            self._say(f"{plan.name} was not placed: {error}")
        else:
            log.info("%s is placed (generation %s)", plan.name, plan.generation)

    async def _remove(self, name: str) -> None:
        worker = self._workers.get(name)
        log.info("%s is stopped%s", name, "" if worker is None else ", to be placed anew")
        try:
            await self._launcher.remove(name, 120.0 if worker is None else worker.plan.grace_s)
        except LauncherError as error:
            self._say(f"{name} was not stopped: {error}")
        else:
            if worker is not None:
                worker.down()  # of one that was killed the lease has not lapsed yet

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("%s", problem)
            self._problem = problem

    async def _follow(self) -> None:
        async for changes in workers_only(self._registry.watch()):
            for change in changes:
                if isinstance(change, WorkerUp):
                    name = place_of(change.record)
                    self._records[change.record.worker_id] = name
                    if (
                        worker := self._workers.get(name)
                    ) is not None and not worker.ready.is_set():
                        log.info("%s is ready on %s", name, change.record.host or "this machine")
                        worker.up()
                else:
                    self._down(change.worker_id, change.reason)
            self._view_known.set()

    def _down(self, worker_id: str, reason: str) -> None:
        name = self._records.pop(worker_id, None)
        # It may be on another host already.
        if name is None or name in self._records.values():
            return
        worker = self._workers.get(name)
        if worker is not None and worker.ready.is_set():
            log.warning("%s is not ready any more: %s", name, reason)
            worker.down()


def of_agents(config: Config) -> AgentLauncherConfig | None:
    """The options of a launcher of agents; None for one of local processes."""
    return config.launcher if isinstance(config.launcher, AgentLauncherConfig) else None

"""A Ray cluster on the clock of a virtual event loop: a head, nodes, and the agents placed there.

A node that has not reached the head for ``DEAD_S`` is dead to it, and its agents are started on
others; on the node itself they run on until it is connected again. An agent registers a worker with
the node's registry, and stops it by ``CutOff``, as ``commutator.supervisor.agent_process`` does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from attrs import define, evolve

from commutator import EngineInfo, WorkerRecord
from commutator.contract.launcher import AgentLauncher, AgentPlan, AgentState, PlacedAgent
from commutator.contract.registry import RETIRED, Registry
from commutator.errors import LauncherError, RegistryError
from commutator.supervisor.agent_process import CutOff

__all__ = ["CUT_OFF_S", "DEAD_S", "Actor", "Node", "RayClient", "SimulatedRay"]

DEAD_S = 3.0
CUT_OFF_S = 8.0
_SLOTS = 2
"""Agents that a node has room for."""
_TRIP_S = 0.01
_ANSWER_S = 2.0
"""Longest wait for the head."""
_BEGIN_S, _LOAD_S = 0.3, 1.0
"""Until an agent's process runs, and until its worker has loaded."""
_AGAIN_S = 0.5
_LOOK_S = 0.5
_DRAINED_S = 0.75
_SETTLE_S = 10.0
_EXIT_S = 10.0


@define(eq=False)
class Actor:
    """What the head knows of an agent."""

    plan: AgentPlan
    node: Node | None = None
    failure: str | None = None
    is_ending: bool = False
    """Whether it was asked to end where it is."""

    def placed(self) -> PlacedAgent:
        return PlacedAgent(
            name=self.plan.name,
            generation=self.plan.generation,
            state=self._state(),
            host="" if self.node is None else self.node.name,
            cause=self.failure,
        )

    def _state(self) -> AgentState:
        if self.failure is not None:
            return AgentState.FAILED
        if self.node is None or not self.node.ray.knows(self.node):
            return AgentState.WAITING
        return AgentState.ENDING if self.is_ending else AgentState.RUNNING


class SimulatedRay:
    """The head, and the nodes that it knows. Call it in the loop that uses it."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.nodes: list[Node] = []
        self.actors: list[Actor] = []
        self.is_up = True
        self.cut: set[str] = set()
        """The hosts and nodes that do not reach the head."""
        self.on_failure = on_failure
        self.instances = itertools.count()

    def reaches(self, host: str) -> bool:
        """Whether a host reaches the head, and gets an answer."""
        return self.is_up and host not in self.cut

    def set_cut(self, host: str, cut: bool) -> None:
        """Cut a host or node off from the head, or no longer."""
        (self.cut.add if cut else self.cut.discard)(host)
        self._connections_changed()

    def set_up(self, up: bool) -> None:
        """Stop the head, or have it back with its state."""
        self.is_up = up
        self._connections_changed()

    def begin_anew(self) -> None:
        """A head without its state; Ray is stopped and started on every node."""
        self.actors.clear()
        for node in self.nodes:
            node.end()
        self._connections_changed()

    def _connections_changed(self) -> None:
        for node in self.nodes:
            if not self.is_up:
                node.lost_s = None  # the head does not count while it is down
            elif self.knows(node):
                node.lost_s = None
                if node.is_dead:  # it finds itself replaced
                    node.is_dead = False
                    node.end()
                for actor in [one for one in node.processes if one not in self.actors]:
                    node.end(actor)
            elif node.lost_s is None:
                node.lost_s = self.loop.time()
                self.loop.call_later(DEAD_S, self._take_for_dead, node, node.lost_s)
        self.schedule()

    def knows(self, node: Node) -> bool:
        """Whether a node is up and connected."""
        return node.is_up and self.reaches(node.name)

    def _take_for_dead(self, node: Node, lost_s: float) -> None:
        if node.lost_s == lost_s:
            node.is_dead = True
            for actor in self.actors:
                if actor.node is node:
                    actor.node, actor.failure = None, None
            self.schedule()

    def schedule(self) -> None:
        """Place what waits on nodes with room."""
        if not self.is_up:
            return
        for actor in self.actors:
            if actor.node is None:
                there = [
                    node
                    for node in self.nodes
                    if self.knows(node) and sum(one.node is node for one in self.actors) < _SLOTS
                ]
                if there:
                    actor.node = there[0]
                    there[0].begin(actor)


class Node:
    """A machine with Ray's processes, and an agent's process for each actor there."""

    def __init__(self, ray: SimulatedRay, name: str, registry: Callable[[], Registry]) -> None:
        """``registry`` makes the client that an agent uses."""
        self.ray = ray
        self.name = name
        self.is_up = True
        self.is_dead = False
        """What the head thinks of it."""
        self.lost_s: float | None = None
        """Since when the head has not heard of it."""
        self.has_model = True
        self.processes: dict[Actor, Process] = {}
        self.ending: set[asyncio.Task[None]] = set()
        self.make_registry = registry

    def begin(self, actor: Actor) -> None:
        actor.is_ending = False
        self.processes[actor] = Process(self, actor)

    def end(self, *actors: Actor) -> None:
        """Kill the processes of these actors, or of all."""
        for actor in actors or list(self.processes):
            self.processes.pop(actor).task.cancel()

    def crash(self, actor: Actor) -> None:
        """Kill an agent; it is started again."""
        self.end(actor)
        self.ray.loop.call_later(_AGAIN_S, self._again, actor)

    def _again(self, actor: Actor) -> None:
        wanted = self.is_up and actor.node is self and actor in self.ray.actors
        if wanted and not actor.is_ending and actor not in self.processes:
            self.begin(actor)

    def lose(self) -> None:
        """The machine is switched off."""
        self.is_up = False
        self.end()
        self.ray._connections_changed()

    def come_back(self) -> None:
        """It is switched on, and Ray starts there."""
        if not self.is_up:
            self.is_up, self.is_dead = True, False
            for actor in self.ray.actors:
                if actor.node is self:  # the head had not noticed
                    self.begin(actor)
            self.ray._connections_changed()


class Process:
    """An agent's process: the worker that it runs, until it is stopped or killed."""

    def __init__(self, node: Node, actor: Actor) -> None:
        self.node = node
        self.actor = actor
        self.ray = node.ray
        self.began_s = node.ray.loop.time()
        self.serves = False
        """Whether the worker would answer requests."""
        self.stopping = asyncio.Event()
        self.lease: int | None = None
        self.task = node.ray.loop.create_task(self._run())
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.serves = False
        if not task.cancelled() and (error := task.exception()) is not None:
            self.ray.on_failure(error)

    async def _run(self) -> None:
        await asyncio.sleep(_BEGIN_S)
        if not self.node.has_model:
            self.actor.failure = f"host {self.node.name}: no model"
            del self.node.processes[self.actor]
            return
        registry = self.node.make_registry()
        try:
            while not self.stopping.is_set():
                await self._live(registry)
        finally:
            await registry.close()
        self.node.processes.pop(self.actor, None)

    async def _live(self, registry: Registry) -> None:
        cut_off = CutOff(CUT_OFF_S, self.ray.loop.time())
        worker = asyncio.create_task(self._work(registry, cut_off))
        try:
            while not self.stopping.is_set() and not cut_off.is_cut_off(self.ray.loop.time()):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), _LOOK_S)
                if cut_off.suspects:
                    answered = self.ray.reaches(self.node.name)
                    cut_off.saw("control", answered, self.ray.loop.time())
            if self.stopping.is_set() and self.lease is not None:
                with suppress(RegistryError):
                    await registry.set_draining(self._worker_id, True)
                    await asyncio.sleep(_DRAINED_S)
                    await registry.deregister(self.lease, RETIRED)
        finally:
            worker.cancel()
            self.serves, self.lease = False, None
            await asyncio.gather(worker, return_exceptions=True)
        while not self.stopping.is_set() and not self.ray.reaches(self.node.name):
            await asyncio.sleep(_LOOK_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), _SETTLE_S)

    @property
    def _worker_id(self) -> str:
        return f"{self.node.name}-{self.actor.plan.name}"

    async def _work(self, registry: Registry, cut_off: CutOff) -> None:
        await asyncio.sleep(_LOAD_S)
        self.serves = True
        record = self._record()
        while True:
            try:
                if self.lease is None or not await registry.keep_alive(self.lease):
                    self.lease = None
                    self.lease = await registry.register(record, LEASE_S)
            except RegistryError:
                cut_off.saw("registry", False, self.ray.loop.time())
            else:
                cut_off.saw("registry", True, self.ray.loop.time())
            await asyncio.sleep(LEASE_S / 3)

    def _record(self) -> WorkerRecord:
        return evolve(
            _RECORD,
            worker_id=self._worker_id,
            engine=self.actor.plan.engine,
            generation=self.actor.plan.generation,
            host=self.node.name,
            instance=f"i{next(self.ray.instances)}",
        )

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, later SIGKILL."""
        self.actor.is_ending = True
        self.stopping.set()
        await asyncio.wait({self.task}, timeout=grace_s)
        self.node.processes.pop(self.actor, None)
        self.task.cancel()


LEASE_S = 5.0
_RECORD = WorkerRecord(
    worker_id="w",
    engine="e",
    kind="sim",
    model="m",
    address="10.0.0.1:1",
    info=EngineInfo(
        kind="sim", version="1", model="m", max_model_len=8, block_size=4, kv_capacity_blocks=1
    ),
)


class OnAct(Protocol):
    """Called before an agent is placed or removed."""

    def __call__(self, name: str, /, *, removes: bool) -> None: ...


class RayClient(AgentLauncher):
    """One launching process's view of the cluster; what it asks may be done though it fails."""

    def __init__(self, ray: SimulatedRay, host: str) -> None:
        self._ray = ray
        self._host = host
        self.seen: dict[str, PlacedAgent] = {}
        """The last answer, by name."""
        self.on_act: OnAct = lambda _, *, removes: None

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def _trip(self) -> None:
        if not self._ray.reaches(self._host):
            await asyncio.sleep(_ANSWER_S)
            raise LauncherError("Ray did not answer")
        await asyncio.sleep(_TRIP_S)

    async def agents(self) -> Sequence[PlacedAgent]:
        await self._trip()
        found = [actor.placed() for actor in self._ray.actors]
        await self._trip()
        self.seen = {one.name: one for one in found}
        return found

    async def place(self, plan: AgentPlan) -> None:
        self.on_act(plan.name, removes=False)
        await self._trip()
        known = {(one.plan.name, one.plan.generation) for one in self._ray.actors}
        if (plan.name, plan.generation) not in known:
            self._ray.actors.append(Actor(plan))
            self._ray.schedule()
        await self._trip()

    async def remove(self, name: str, grace_s: float) -> None:
        self.on_act(name, removes=True)
        await self._trip()
        ending = [actor for actor in self._ray.actors if actor.plan.name == name]
        await asyncio.gather(*(self._end(actor, grace_s) for actor in ending))
        await self._trip()

    async def _end(self, actor: Actor, grace_s: float) -> None:
        node = actor.node
        if node is not None and self._ray.knows(node):
            process = node.processes.get(actor)
            if process is not None:
                await asyncio.wait_for(process.stop(grace_s), grace_s + _EXIT_S)
        # What runs on a node out of reach ends once it is connected again.
        if actor in self._ray.actors:
            self._ray.actors.remove(actor)
        self._ray.schedule()

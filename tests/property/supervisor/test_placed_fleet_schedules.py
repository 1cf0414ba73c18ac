"""Launching processes over a simulated etcd, Ray, network and clock: schedules of faults.

``PlacedFleet``, ``reconcile``, ``Claim``, ``CutOff`` and the registry's client are the real code.
Two hosts launch, one of which may act, and workers run on three nodes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, cast
from unittest.mock import patch

from attrs import frozen
from tests.support.schedules import run_schedules
from tests.support.simulated_etcd import (
    ELECTION_S,
    MEMBERS,
    MemberState,
    SimulatedEtcd,
    endpoints,
)
from tests.support.simulated_ray import CUT_OFF_S, LEASE_S, Node, RayClient, SimulatedRay

from commutator.contract.launcher import AgentPlan, AgentState
from commutator.errors import ConfigError
from commutator.registry.claims import LAUNCHER, Claim
from commutator.supervisor.placed_fleet import PlacedFleet, PlacedWorker
from commutator_etcd import client
from commutator_etcd.config import EtcdConfig
from commutator_etcd.registry import EtcdRegistry
from commutator_etcd.view import Keys

ENGINES = {"p": 2, "d": 1}
HOSTS = ["l0", "l1"]
NODES = ["n0", "n1", "n2"]
EVERYWHERE = [*HOSTS, *NODES]
GENERATIONS = ["0a", "1b"]
PAUSES_S = [0.0, 0.2, 1.0, 3.0, 7.0, 20.0]
TICK_S = 0.2
STARTS_AGAIN_S = 2.0
"""Until a launching process that ended by itself is started again."""
PLACED_AGAIN_S = 30.0
"""As ``PlacedFleet`` waits with a worker that could not start."""
REPLACED_S = 2 * (2 * LEASE_S + 5.0)
"""For a new generation of both workers of an engine, one after the other."""
CONVERGED_S = LEASE_S + CUT_OFF_S + 10.0 + PLACED_AGAIN_S + REPLACED_S
QUIET_S = 6.0
KEYS = Keys("c")


def plans(generation: str) -> dict[str, AgentPlan]:
    return {
        f"{engine}-{n}": AgentPlan(
            name=f"{engine}-{n}", engine=engine, generation=generation, module="m", grace_s=3.0
        )
        for engine, count in ENGINES.items()
        for n in range(count)
    }


class Host:
    """`commutator serve` on a host, started again when it ends."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.generation = GENERATIONS[0]
        self.begin()

    def begin(self) -> None:
        world = self.world
        self.wanted = plans(self.generation)
        self.registry = world.registry_of(self.name)
        self.claim = Claim(
            LAUNCHER, "10.0.0.1:1", self.registry, LEASE_S, host=self.name, clock=world.clock
        )
        self.launcher = RayClient(world.ray, self.name)
        self.launcher.on_act = self.acts
        self.workers = {
            name: PlacedWorker(plan, cast("Any", None)) for name, plan in self.wanted.items()
        }
        self.fleet = PlacedFleet(
            self.launcher,
            self.registry,
            list(self.workers.values()),
            lambda: self.claim.held,
            clock=world.clock,
        )
        self.tasks = [world.start(self.hold()), world.start(self.keep())]

    async def hold(self) -> None:
        while True:
            await self.claim.renew()
            await asyncio.sleep(LEASE_S / 3)

    async def keep(self) -> None:
        try:
            await self.fleet.run()
        except ConfigError:
            ever_ready = {one.plan.engine for one in self.workers.values() if one.was_ready}
            assert ever_ready != ENGINES.keys(), "it ends though workers of each engine could start"
            self.begin_again(orderly=True, pause_s=STARTS_AGAIN_S)

    def begin_again(self, *, orderly: bool, pause_s: float = 0.0) -> None:
        """End it, and start it after a pause."""
        tasks, self.tasks = self.tasks, []  # at once: what is ended is not ended again

        async def again() -> None:
            await self.end(tasks, orderly=orderly)
            await asyncio.sleep(pause_s)
            self.begin()

        self.world.start(again())

    async def end(self, tasks: Iterable[asyncio.Task[None]], *, orderly: bool) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if orderly:
            await self.claim.give_up()
        await self.registry.close()

    def acts(self, name: str, *, removes: bool) -> None:
        try:
            assert self.claim.held, "it may not act"
            if removes:
                self.check_removal(name)
        except AssertionError as error:  # the fleet would only log it
            self.world.fail(error)

    def check_removal(self, name: str) -> None:
        """It ends only what it may, and one ready worker of an engine at a time."""
        seen, plan = self.launcher.seen[name], self.wanted.get(name)
        if plan is None:
            return
        over = seen.state in (AgentState.FAILED, AgentState.ENDING)
        assert over or seen.generation != plan.generation, "what is wanted stays"
        self.world.removals += 1
        if not over and self.workers[name].ready.is_set():
            others = [
                one
                for one in self.workers.values()
                if one.plan.engine == plan.engine and one.name != name
            ]
            assert all(one.ready.is_set() for one in others), "two are replaced at once"


class World:
    """Everything that one schedule befalls."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self.loop.create_future()
        """Has an exception as soon as something does not hold."""
        self.etcd = SimulatedEtcd()
        self.ray = SimulatedRay(self.fail)
        self.removals = 0
        self.hosts: dict[str, Host] = {}
        self.cut_off_s: dict[str, float] = {}
        """Since when a node has reached neither etcd nor Ray's head."""

    def begin(self) -> None:
        self.ray.nodes += [Node(self.ray, name, partial(self.registry_of, name)) for name in NODES]
        self.hosts |= {name: Host(self, name) for name in HOSTS}
        self.tick()

    def clock(self) -> float:
        """In steps of 2^-20 s, so that sums and differences of times are exact."""
        return round(self.loop.time() * 2**20) / 2**20

    def registry_of(self, name: str) -> EtcdRegistry:
        where = endpoints(EVERYWHERE.index(name))
        config = EtcdConfig(kind="etcd", endpoints=where, cluster="c")
        return EtcdRegistry(config, clock=self.clock)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        task.add_done_callback(self.ended)
        return task

    def ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def tick(self) -> None:
        try:
            self.check()
        except AssertionError as error:
            self.fail(error)
        else:
            self.loop.call_later(TICK_S, self.tick)

    def check(self) -> None:
        """What holds at every moment."""
        now_s = self.loop.time()
        acting = [host.name for host in self.hosts.values() if host.claim.held and host.tasks]
        assert len(acting) <= 1, "two processes are sure that they may act"
        for number, node in enumerate(self.ray.nodes, len(HOSTS)):
            if self.ray.reaches(node.name) or self.etcd.answers(number):
                self.cut_off_s.pop(node.name, None)
                continue
            since_s = self.cut_off_s.setdefault(node.name, now_s)
            for one in node.processes.values():
                # One that began meanwhile is known to nobody, and has to notice by itself.
                noticed_s = max(since_s, one.began_s) + CUT_OFF_S + LEASE_S
                assert not one.serves or now_s <= noticed_s, (
                    "a worker serves on though its node is cut off"
                )

    async def wait(self, seconds: float) -> None:
        if seconds:
            await asyncio.wait({self.failure}, timeout=seconds)
        if self.failure.done():
            self.failure.result()

    def heal(self) -> None:
        for number, name in enumerate(EVERYWHERE):
            self.etcd.set_cut(number, frozenset())
            self.ray.set_cut(name, False)
        for member in range(MEMBERS):
            self.etcd.set_member(member, MemberState.UP)
        for node in self.ray.nodes:
            node.has_model = True
            node.come_back()
        self.ray.set_up(True)

    def difference(self) -> str:
        """What is not as the configuration wants it; empty: nothing."""
        acting = [host for host in self.hosts.values() if host.claim.held and host.tasks]
        if len(acting) != 1:
            return f"{len(acting)} processes act"
        (host,) = acting
        found = sorted((one.plan.name, one.plan.generation) for one in self.ray.actors)
        if found != sorted((one.name, one.generation) for one in host.wanted.values()):
            return f"placed are {found}"
        running = {
            actor: process for node in self.ray.nodes for actor, process in node.processes.items()
        }
        if running.keys() != set(self.ray.actors):
            return "other processes run than were placed"
        if not all(one.serves and one.lease is not None for one in running.values()):
            return "a worker does not serve"
        keys = {name for kind, name in map(KEYS.parts, self.etcd.values) if kind == b"workers"}
        if keys != {LAUNCHER, *(one._worker_id for one in running.values())}:
            return f"registered are {sorted(keys)}"
        unready = [one.name for one in host.workers.values() if not one.ready.is_set()]
        return f"it does not know that {unready} are ready" if unready else ""

    async def converge(self) -> None:
        began_s = self.loop.time()
        while problem := self.difference():
            assert self.loop.time() < began_s + CONVERGED_S, problem
            await self.wait(0.5)


@frozen
class Cut:
    """A host or node loses its way to members of etcd, to Ray's head, or to both."""

    name: str
    members: frozenset[int]
    head: bool

    def befall(self, world: World) -> None:
        world.etcd.set_cut(EVERYWHERE.index(self.name), self.members)
        world.ray.set_cut(self.name, self.head)


@frozen
class Member:
    """A member of etcd is paused, killed, or back."""

    member: int
    state: MemberState

    def befall(self, world: World) -> None:
        world.etcd.set_member(self.member, self.state)


@frozen
class Switch:
    """A node is switched off, or on."""

    node: int
    on: bool

    def befall(self, world: World) -> None:
        node = world.ray.nodes[self.node]
        if self.on:
            node.come_back()
        else:
            node.lose()


@frozen
class Head:
    """Ray's head goes, or is back with its state."""

    up: bool

    def befall(self, world: World) -> None:
        world.ray.set_up(self.up)


@frozen
class HeadAnew:
    """Ray is started again on all hosts, and its head knows nothing."""

    def befall(self, world: World) -> None:
        world.ray.set_up(True)
        world.ray.begin_anew()


@frozen
class Model:
    """A node has no model, or has it again."""

    node: int
    there: bool

    def befall(self, world: World) -> None:
        world.ray.nodes[self.node].has_model = self.there


@frozen
class Crash:
    """An agent is killed."""

    number: int

    def befall(self, world: World) -> None:
        running = [(n, actor) for n in world.ray.nodes for actor in n.processes]
        if running:
            node, actor = running[self.number % len(running)]
            node.crash(actor)


@frozen
class Restart:
    """A launching process is stopped or killed, and another is started with this file."""

    name: str
    generation: str
    orderly: bool

    def befall(self, world: World) -> None:
        host = world.hosts[self.name]
        if host.tasks:  # it is not being started again already
            host.generation = self.generation
            host.begin_again(orderly=self.orderly)


Fault = Cut | Member | Switch | Head | HeadAnew | Model | Crash | Restart


def some_fault(by: random.Random) -> Fault:
    where, node = by.choice(EVERYWHERE), by.randrange(len(NODES))
    some = frozenset(m for m in range(MEMBERS) if by.random() < 1 / 2)
    every = frozenset(range(MEMBERS))
    often, seldom = by.random() < 1 / 2, by.random() < 1 / 4
    faults: list[Fault] = [
        Cut(where, some, head=often),
        Cut(where, every, head=True),
        Cut(where, every, head=False),
        Member(by.randrange(MEMBERS), by.choice(list(MemberState))),
        Switch(node, on=often),
        Head(up=often),
        HeadAnew(),
        Model(node, there=seldom),
        Crash(by.randrange(4)),
        Restart(by.choice(HOSTS), by.choice(GENERATIONS), orderly=often),
        Restart(by.choice(HOSTS), by.choice(GENERATIONS), orderly=seldom),
    ]
    return by.choice(faults)


async def carry_out(schedule: list[tuple[Fault, float]]) -> None:
    world = World()
    with patch.object(client, "_Member", world.etcd.member):
        world.begin()
        await world.converge()
        assert world.removals == 0
        for fault, pause_s in schedule:
            fault.befall(world)
            await world.wait(pause_s)
        world.heal()
        await world.wait(ELECTION_S)
        await world.converge()
        removals, actors = world.removals, list(world.ray.actors)
        await world.wait(QUIET_S)
        assert (world.removals, world.ray.actors) == (removals, actors), "it does not settle"
        assert world.difference() == ""
        for host in world.hosts.values():
            await host.end(host.tasks, orderly=False)
        for node in world.ray.nodes:
            node.end()


def test_the_wanted_workers_run_after_any_faults() -> None:
    run_schedules(carry_out, some_fault, PAUSES_S, few=60)

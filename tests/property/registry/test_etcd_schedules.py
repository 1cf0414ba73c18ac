"""The registry `etcd` whole, over a simulated etcd, network and clock: schedules of faults.

Lease holders, watchers and what puts lost keys back are the real code, on several hosts. CI runs a
hundred schedules; REGISTRY_SCHEDULES=100000, as in `make test-cluster`, runs more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from unittest.mock import patch

from attrs import frozen
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from tests.support.simulated_etcd import (
    ELECTION_S,
    MEMBERS,
    MemberState,
    SimulatedEtcd,
    endpoints,
)
from tests.support.virtual_time import VirtualTimeLoop

from commutator import WorkerRecord
from commutator.errors import RegistryError
from commutator.registry import LAPSED, Change, WorkerUp
from commutator_etcd import client
from commutator_etcd.config import EtcdConfig
from commutator_etcd.registry import EtcdRegistry
from commutator_etcd.view import Desired, Keys, decoded
from commutator_testing.registries import make_worker

SCHEDULES = int(os.environ.get("REGISTRY_SCHEDULES", "100"))
BY_CHANCE = "REGISTRY_SCHEDULES" in os.environ
"""CI has the same schedules each time, so that nothing fails for another change's sake."""
HOSTS = 3
HOMES = {"a": 0, "b": 0, "c": 1}
"""The host of each worker; the last host has only a front door."""
TTL_S = 5.0
TICK_S = 0.1
RESYNC_S = 20.0
GRACE_S = 1.0
"""For keys that come back, as ``ClusterView`` grants it."""
CONVERGED_S = 2.0
"""After the last fault, all views are what etcd holds."""
BACK_S = TTL_S / 3 + 1.5 + CONVERGED_S
"""After it every worker is registered: a pause between renewals, one that waits, the way."""
SLOW_S = 0.4
FRESH_S = 3.0 + 2 * 1.5 + 1.0
"""The age of a healthy host's view, at most: silence, two members that do not answer, pauses."""
KEYS = Keys("c")

instances = itertools.count()


@lru_cache(maxsize=1000)
def record_of(key: bytes, value: bytes) -> WorkerRecord | None:
    return decoded(key, value, WorkerRecord)


@lru_cache(maxsize=1000)
def desired_of(key: bytes, value: bytes) -> Desired | None:
    return decoded(key, value, Desired)


class Host:
    """A supervisor's process: its registry, its workers, and the view that it has."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.impaired_s = self.world.loop.time()
        """When it last could not reach two members that work, quickly."""
        self.died_s = -1e9
        """When its processes were killed; a paused member may get their renewals later."""
        self.cut_off_s: float | None = None
        """Since when it has reached no member at all."""
        self.begin()

    def begin(self) -> None:
        config = EtcdConfig(
            kind="etcd", endpoints=endpoints(self.number), cluster="c", resync_s=RESYNC_S
        )
        self.registry = EtcdRegistry(config, clock=self.world.clock)
        self.view: dict[str, WorkerRecord] = {}
        self.tasks = [asyncio.create_task(self.follow())]
        for worker_id, home in HOMES.items():
            if home == self.number:
                self.run(worker_id)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.registry.close()

    def run(self, worker_id: str) -> None:
        """A worker's agent."""
        record = make_worker(worker_id, port=self.number + 1, instance=f"i{next(instances)}")
        self.tasks.append(asyncio.create_task(self.work(record)))

    async def work(self, record: WorkerRecord) -> None:
        lease: int | None = None
        while True:
            with suppress(RegistryError):
                if lease is None or not await self.registry.keep_alive(lease):
                    lease = await self.registry.register(record, TTL_S)
            await asyncio.sleep(TTL_S / 3)

    async def follow(self) -> None:
        async for changes in self.registry.watch():
            for change in changes:
                self.take(change)

    def take(self, change: Change) -> None:
        now_s = self.world.loop.time()
        if self.cut_off_s is not None:
            heard_s = self.cut_off_s + SLOW_S + GRACE_S + TICK_S
            assert now_s <= heard_s, "silence is never a change"
        if isinstance(change, WorkerUp):
            known = self.view.get(change.record.worker_id)
            assert known != change.record, "up twice"
            self.view[change.record.worker_id] = change.record
            return
        gone = self.view.pop(change.worker_id)
        if change.reason == LAPSED:
            home = self.world.hosts[gone_host(gone)]
            disturbed_s = max(home.impaired_s, self.impaired_s, home.died_s + 2 * TTL_S)
            assert now_s < disturbed_s + TTL_S + 2 * GRACE_S, (
                "a lease lapsed whose holder reached two members all the time"
            )

    def watch_health(self) -> None:
        """Note whether its network, and etcd, are as they should be."""
        etcd, now_s = self.world.etcd, self.world.loop.time()
        reached = [m for m in range(MEMBERS) if (self.number, m) not in etcd.cut]
        up = [m for m in reached if etcd.members[m] is MemberState.UP]
        if not etcd.works or len(up) < 2 or etcd.trip_s.get(self.number, 0.0) >= SLOW_S:
            self.impaired_s = now_s
        if reached:
            self.cut_off_s = None
        elif self.cut_off_s is None:
            self.cut_off_s = now_s


def gone_host(record: WorkerRecord) -> int:
    return int(record.address.rpartition(":")[2]) - 1


class World:
    """Everything that one schedule befalls."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.etcd = SimulatedEtcd()
        self.hosts: list[Host] = []
        self.contested = False
        """Whether two processes want the same name."""
        self.ended_s = -1e9
        """When etcd last ended leases that lived."""

    def clock(self) -> float:
        """In steps of 2^-20 s: loops call timers up to 1 ns early, and no virtual time passes."""
        return round(self.loop.time() * 2**20) / 2**20

    def check(self) -> None:
        """What holds at every moment."""
        now_s = self.loop.time()
        sure: dict[str, set[str]] = {}
        for host in self.hosts:
            host.watch_health()
            if now_s > host.impaired_s + FRESH_S:
                age_s = host.registry.view_age_s()
                assert age_s is not None
                assert age_s < FRESH_S, "it reaches two members, and does not hear of changes"
            for held in host.registry._held.values():
                if held.holder.deadline_s > now_s:
                    sure.setdefault(held.record.worker_id, set()).add(held.record.instance)
        for worker_id, holders in sure.items():
            assert len(holders) == 1, f"two processes are sure to have the name {worker_id}"

    async def wait(self, seconds: float) -> None:
        end_s = self.loop.time() + seconds
        while self.loop.time() < end_s:
            self.check()
            await asyncio.sleep(TICK_S)
            for host in self.hosts:
                for task in host.tasks:
                    if task.done():
                        task.result()

    def truth(self) -> dict[str, WorkerRecord]:
        """The workers that etcd holds, as operators want them."""
        found = {}
        for key, stored in self.etcd.values.items():
            kind, worker_id = KEYS.parts(key)
            if kind == b"workers" and (record := record_of(key, stored.value)) is not None:
                wanted = self.etcd.values.get(desired_key := KEYS.desired(worker_id))
                desired = None if wanted is None else desired_of(desired_key, wanted.value)
                found[worker_id] = (desired or Desired()).applied_to(record)
        return found

    def agreed(self) -> bool:
        truth = self.truth()
        return all(host.view == truth for host in self.hosts)

    async def heal(self) -> None:
        for host in self.hosts:
            self.etcd.set_cut(host.number, frozenset())
            self.etcd.trip_s.pop(host.number, None)
        for member in range(MEMBERS):
            self.etcd.set_member(member, MemberState.UP)
        if not self.etcd.works:
            await self.wait(ELECTION_S + TICK_S)
            assert self.etcd.works


@frozen
class Cut:
    """A host loses its way to some members, and has one to all others."""

    host: int
    members: frozenset[int]

    async def befall(self, world: World) -> None:
        world.etcd.set_cut(self.host, self.members)


@frozen
class Member:
    """A member is paused, killed, or back."""

    member: int
    state: MemberState

    async def befall(self, world: World) -> None:
        world.etcd.set_member(self.member, self.state)


@frozen
class Delay:
    """Messages of a host take so long from now on."""

    host: int
    seconds: float

    async def befall(self, world: World) -> None:
        world.etcd.trip_s[self.host] = self.seconds


@frozen
class Compact:
    async def befall(self, world: World) -> None:
        world.etcd.compact()


@frozen
class EndLeases:
    """A former leader wakes up and ends leases that were renewed.

    Holders get their names back because nobody else wants them.
    """

    async def befall(self, world: World) -> None:
        apart = world.loop.time() > world.ended_s + 2 * TTL_S
        if world.etcd.works and apart and not world.contested:
            world.etcd.end_leases()
            world.ended_s = world.loop.time()


@frozen
class Restart:
    """A host's processes are killed, and others are started in their places."""

    host: int

    async def befall(self, world: World) -> None:
        host = world.hosts[self.host]
        host.died_s = host.impaired_s = world.loop.time()
        await host.end()
        host.begin()


@frozen
class Drain:
    """An operator drains a worker, or no longer."""

    host: int
    worker_id: str
    draining: bool

    async def befall(self, world: World) -> None:
        host = world.hosts[self.host]

        async def ask() -> None:
            with suppress(RegistryError):
                await host.registry.set_draining(self.worker_id, self.draining)

        host.tasks.append(asyncio.create_task(ask()))


@frozen
class Take:
    """A worker of another host has the same id, by mistake."""

    host: int
    worker_id: str

    async def befall(self, world: World) -> None:
        if world.loop.time() > world.ended_s + 2 * TTL_S:
            world.contested = True
            world.hosts[self.host].run(self.worker_id)


EVERY_MEMBER = frozenset(range(MEMBERS))
Fault = Cut | Member | Delay | Compact | EndLeases | Restart | Drain | Take
SOME_HOST = st.integers(0, HOSTS - 1)
SOME_WORKER = st.sampled_from(sorted(HOMES))
SOME_FAULT: st.SearchStrategy[Fault] = st.one_of(
    st.builds(Cut, SOME_HOST, st.frozensets(st.integers(0, MEMBERS - 1))),
    st.builds(Cut, SOME_HOST, st.just(EVERY_MEMBER)),
    st.builds(Member, st.integers(0, MEMBERS - 1), st.sampled_from(MemberState)),
    st.builds(Delay, SOME_HOST, st.sampled_from([0.002, 0.03, SLOW_S])),
    st.just(Compact()),
    st.just(EndLeases()),
    st.builds(Restart, SOME_HOST),
    st.builds(Drain, SOME_HOST, SOME_WORKER, st.booleans()),
    st.builds(Take, SOME_HOST, SOME_WORKER),
)
SCHEDULE = st.lists(
    st.tuples(SOME_FAULT, st.sampled_from([0.0, 0.2, 1.0, 3.0, 7.0])), min_size=1, max_size=8
)


@contextmanager
def quiet() -> Iterator[None]:
    """The registry logs each fault, as it should."""
    log = logging.getLogger("commutator_etcd")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


async def carry_out(schedule: list[tuple[Fault, float]]) -> None:
    world = World()
    with patch.object(client, "_Member", world.etcd.member):
        world.hosts += [Host(world, number) for number in range(HOSTS)]
        await world.wait(0.5)
        assert world.truth().keys() == HOMES.keys()
        assert world.agreed()
        for fault, pause_s in schedule:
            await fault.befall(world)
            await world.wait(pause_s)
        await world.heal()
        healed_s = world.loop.time()
        while not world.agreed():
            await world.wait(TICK_S)
            assert world.loop.time() < healed_s + CONVERGED_S, "the views are not what etcd holds"
        await world.wait(TTL_S + GRACE_S + BACK_S)  # leases of the dead lapse, and are taken
        assert world.truth().keys() == HOMES.keys()
        assert world.agreed()
        for host in world.hosts:
            age_s = host.registry.view_age_s()
            assert age_s is not None
            assert age_s < 2.0
            await host.end()
    await world.etcd.close()


@example([(Take(2, "a"), 0.2), (Cut(0, EVERY_MEMBER), 7.0)])
@example([(Delay(1, SLOW_S), 0.0), (Take(1, "a"), 0.0), (Take(2, "a"), 0.0), (Restart(0), 7.0)])
@example([(Member(0, MemberState.PAUSED), 7.0), (Restart(0), 7.0), (Restart(2), 7.0)])
@given(SCHEDULE)
@settings(max_examples=SCHEDULES, derandomize=not BY_CHANCE)
def test_schedules_of_faults(schedule: list[tuple[Fault, float]]) -> None:
    note(f"{schedule!r}")
    with quiet(), asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(carry_out(schedule))

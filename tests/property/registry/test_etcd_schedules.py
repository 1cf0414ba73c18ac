"""The registry `etcd` whole, over a simulated etcd, network and clock: schedules of faults.

Lease holders, watchers and what puts lost keys back are the real code, on several hosts. Hypothesis
looks for a small schedule that fails; ``tests.support.schedules`` runs 100,000 by chance.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine
from contextlib import suppress
from functools import lru_cache
from typing import Any
from unittest.mock import patch

from attrs import frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.schedules import MOST_FAULTS, run_schedule, run_schedules
from tests.support.simulated_etcd import (
    ELECTION_S,
    MEMBERS,
    MemberState,
    SimulatedEtcd,
    endpoints,
)

from commutator import WorkerRecord
from commutator.contract.registry import LAPSED, Change, WorkerUp
from commutator.errors import RegistryError
from commutator_etcd import client
from commutator_etcd.config import EtcdConfig
from commutator_etcd.registry import EtcdRegistry
from commutator_etcd.view import Desired, Keys, decoded
from commutator_testing.registries import make_worker

HOSTS = 3
HOMES = {"a": 0, "b": 0, "c": 1}
"""The host of each worker; the last host has only a front door."""
EVERY_MEMBER = frozenset(range(MEMBERS))
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
        self.was_impaired = False
        self.impaired_until_s = world.loop.time()
        """When it last could not reach two members that work, quickly; see ``impaired_s``."""
        self.reached = set(EVERY_MEMBER)
        """The members that work and that it reaches."""
        self.lost_s = -1e9
        """When it last lost one of these; it may not know yet that it has to ask another."""
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
        self.tasks: list[asyncio.Task[None]] = []
        self.start(self.follow())
        for worker_id, home in HOMES.items():
            if home == self.number:
                self.run(worker_id)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.registry.close()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it until the host ends; the schedule fails if it fails."""
        task = asyncio.create_task(work)
        self.tasks.append(task)
        task.add_done_callback(self.world.ended)

    def run(self, worker_id: str) -> None:
        """A worker's agent."""
        record = make_worker(
            worker_id, port=self.number + 1, instance=f"i{next(self.world.instances)}"
        )
        self.start(self.work(record))

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
            assert now_s <= self.cut_off_s + SLOW_S, "silence is never a change"
        if isinstance(change, WorkerUp):
            known = self.view.get(change.record.worker_id)
            assert known != change.record, "up twice"
            self.view[change.record.worker_id] = change.record
            return
        gone = self.view.pop(change.worker_id)
        if change.reason == LAPSED:
            home, ended_s = self.world.hosts[gone_host(gone)], self.world.ended_s
            disturbed_s = max(home.impaired_s, self.impaired_s, home.died_s + 2 * TTL_S)
            # Its holder heard too late that etcd had ended it: only when it renewed it.
            late = ended_s < home.lost_s + FRESH_S and now_s < ended_s + BACK_S
            assert late or now_s < disturbed_s + TTL_S + 2 * GRACE_S, (
                "a lease lapsed whose holder reached two members all the time"
            )

    @property
    def impaired_s(self) -> float:
        return self.world.loop.time() if self.was_impaired else self.impaired_until_s

    def note_health(self) -> None:
        """Note whether its network, and etcd, are as they should be, from now on."""
        etcd, now_s = self.world.etcd, self.world.loop.time()
        reached = [m for m in range(MEMBERS) if (self.number, m) not in etcd.cut]
        up = {m for m in reached if etcd.members[m] is MemberState.UP}
        if self.reached - up:
            self.lost_s = now_s
        self.reached = up
        slow = etcd.trip_s.get(self.number, 0.0) >= SLOW_S
        impaired = not etcd.works or len(up) < 2 or slow
        if impaired or self.was_impaired:
            self.impaired_until_s = now_s
        self.was_impaired = impaired
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
        self.etcd = SimulatedEtcd(self.note_health)
        self.hosts: list[Host] = []
        self.failure: asyncio.Future[None] = self.loop.create_future()
        """Has an exception as soon as something does not hold."""
        self.instances = itertools.count()
        self.contested = False
        """Whether two processes want the same name."""
        self.ended_s = -1e9
        """When etcd last ended leases that lived."""

    def clock(self) -> float:
        """In steps of 2^-20 s: loops call timers up to 1 ns early, and no virtual time passes."""
        return round(self.loop.time() * 2**20) / 2**20

    def note_health(self) -> None:
        for host in self.hosts:
            host.note_health()

    def begin(self) -> None:
        """Start all hosts, and check from now on what holds at every moment."""
        self.hosts += [Host(self, number) for number in range(HOSTS)]
        self.tick()

    def tick(self) -> None:
        try:
            self.check()
        except AssertionError as error:
            self.fail(error)
        else:
            self.loop.call_later(TICK_S, self.tick)

    def check(self) -> None:
        now_s = self.loop.time()
        sure: dict[str, str] = {}
        for host in self.hosts:
            if now_s > host.impaired_s + FRESH_S:
                age_s = host.registry.view_age_s()
                assert age_s is not None
                assert age_s < FRESH_S, "it reaches two members, and does not hear of changes"
            for held in host.registry._held.values():
                if held.holder.deadline_s > now_s:
                    record = held.record
                    holder = sure.setdefault(record.worker_id, record.instance)
                    assert holder == record.instance, (
                        f"two processes are sure to have the name {record.worker_id}"
                    )

    def ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    async def wait(self, seconds: float) -> None:
        if seconds:
            await asyncio.wait({self.failure}, timeout=seconds)
        if self.failure.done():
            self.failure.result()

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
            self.etcd.set_trip(host.number, None)
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
        world.etcd.set_trip(self.host, self.seconds)


@frozen
class Compact:
    async def befall(self, world: World) -> None:
        world.etcd.compact()


@frozen
class EndLeases:
    """A former leader wakes up and ends leases that were renewed.

    Holders get their names back because nobody else wants them: at once those that hear of it, so
    that watchers see nothing, others with their next renewals.
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
        host.died_s = host.impaired_until_s = world.loop.time()
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

        host.start(ask())


@frozen
class Take:
    """A worker of another host has the same id, by mistake."""

    host: int
    worker_id: str

    async def befall(self, world: World) -> None:
        if world.loop.time() > world.ended_s + 2 * TTL_S:
            world.contested = True
            world.hosts[self.host].run(self.worker_id)


Fault = Cut | Member | Delay | Compact | EndLeases | Restart | Drain | Take
DELAYS_S = [0.002, 0.03, SLOW_S]
PAUSES_S = [0.0, 0.2, 1.0, 3.0, 7.0]
SOME_HOST = st.integers(0, HOSTS - 1)
SOME_WORKER = st.sampled_from(sorted(HOMES))
SOME_FAULT: st.SearchStrategy[Fault] = st.one_of(
    st.builds(Cut, SOME_HOST, st.frozensets(st.integers(0, MEMBERS - 1))),
    st.builds(Cut, SOME_HOST, st.just(EVERY_MEMBER)),
    st.builds(Member, st.integers(0, MEMBERS - 1), st.sampled_from(MemberState)),
    st.builds(Delay, SOME_HOST, st.sampled_from(DELAYS_S)),
    st.just(Compact()),
    st.just(EndLeases()),
    st.builds(Restart, SOME_HOST),
    st.builds(Drain, SOME_HOST, SOME_WORKER, st.booleans()),
    st.builds(Take, SOME_HOST, SOME_WORKER),
)
SCHEDULE = st.lists(
    st.tuples(SOME_FAULT, st.sampled_from(PAUSES_S)), min_size=1, max_size=MOST_FAULTS
)


def some_fault(by: random.Random) -> Fault:
    """As ``SOME_FAULT``, a hundred times faster."""
    host, worker_id = by.randrange(HOSTS), by.choice(sorted(HOMES))
    some_members = frozenset(m for m in range(MEMBERS) if by.random() < 1 / 2)
    faults: list[Fault] = [
        Cut(host, some_members),
        Cut(host, EVERY_MEMBER),
        Member(by.randrange(MEMBERS), by.choice(list(MemberState))),
        Delay(host, by.choice(DELAYS_S)),
        Compact(),
        EndLeases(),
        Restart(host),
        Drain(host, worker_id, by.random() < 1 / 2),
        Take(host, worker_id),
    ]
    return by.choice(faults)


async def carry_out(schedule: list[tuple[Fault, float]]) -> None:
    world = World()
    with patch.object(client, "_Member", world.etcd.member):
        world.begin()
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


@example([(Take(2, "a"), 0.2), (Cut(0, EVERY_MEMBER), 7.0)])
@example([(Delay(1, SLOW_S), 0.0), (Take(1, "a"), 0.0), (Take(2, "a"), 0.0), (Restart(0), 7.0)])
@example([(Member(0, MemberState.PAUSED), 7.0), (Restart(0), 7.0), (Restart(2), 7.0)])
@example([(Compact(), 7.0), (EndLeases(), 0.0), (Cut(2, EVERY_MEMBER), 3.0)])
@given(SCHEDULE)
@settings(max_examples=100, derandomize=True)
def test_schedules_of_faults(schedule: list[tuple[Fault, float]]) -> None:
    run_schedule(carry_out(schedule))


def test_many_schedules_by_chance() -> None:
    run_schedules(carry_out, some_fault, PAUSES_S, few=20)

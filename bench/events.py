"""What a KV event message costs each process on its way, by event bus and number of front doors.

Engines publish at a fixed rate; front doors decode and index everything. CPU time of whole
processes is counted, their I/O threads included, so other load on the machine disturbs little. With
`zmq` every front door reads every engine; with `nats` the host reads the engines and passes on, and
the server makes the copies.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from attrs import evolve

from bench.needs import NotInstalledError
from bench.result import Figure
from bench.waiting import wait_until
from commutator.contract.block import BlockStored
from commutator.contract.event_bus import EventBus, EventBusConfig
from commutator.contract.routing import RouterConfig
from commutator.contract.worker import EngineInfo, EventSource, WorkerRecord
from commutator.kv_events.relay import EventRelay
from commutator.plugins import load_plugins
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator_engine_kit import EventPublisher
from commutator_nats.config import NatsConfig

WORKERS = 4
DOORS = (1, 8)
MESSAGES = 1_500
"""Of each worker."""
RATE = 250
"""Messages a second of each worker."""
BLOCKS, BLOCK_SIZE = 4, 16
"""Of a message."""
ROUNDS = 2
_TICK_S = 0.02


def _record(worker: int, source: EventSource) -> WorkerRecord:
    info = EngineInfo(
        kind="bench",
        version="1",
        model="m",
        max_model_len=4096,
        block_size=BLOCK_SIZE,
        kv_capacity_blocks=100_000,
        kv_events=source,
    )
    return WorkerRecord(
        worker_id=f"w-{worker}",
        engine="w",
        kind="bench",
        model="m",
        address="127.0.0.1:1",
        info=info,
        instance="i",
    )


def _engines(pipe: Connection) -> None:
    publishers = [EventPublisher() for _ in range(WORKERS)]
    pipe.send([publisher.source for publisher in publishers])
    pipe.recv()
    cpu_s, begun_s, sent = time.process_time(), time.monotonic(), 0
    while sent < MESSAGES:
        due = min(MESSAGES, int((time.monotonic() - begun_s) * RATE))
        for number in range(sent, due):
            first = number * BLOCKS
            stored = BlockStored(
                block_hashes=tuple(range(first, first + BLOCKS)),
                parent_block_hash=None,
                token_ids=tuple(range(number, number + BLOCKS * BLOCK_SIZE)),
                block_size=BLOCK_SIZE,
            )
            for publisher in publishers:
                publisher.publish([stored])
        sent = due
        time.sleep(_TICK_S)
    pipe.recv()
    pipe.send(time.process_time() - cpu_s)
    for publisher in publishers:
        publisher.close()


def _bus(config: EventBusConfig) -> EventBus:
    bus: EventBus = load_plugins().event_buses.kinds[config.kind].thing(config)
    return bus


async def _host(pipe: Connection, config: EventBusConfig, records: list[WorkerRecord]) -> None:
    bus = _bus(config)
    relays = [EventRelay(bus) for _ in records]
    pipe.send([await relay.announced(one) for relay, one in zip(relays, records, strict=True)])
    await asyncio.to_thread(pipe.recv)
    cpu_s = time.process_time()
    await asyncio.to_thread(pipe.recv)
    pipe.send(time.process_time() - cpu_s)
    for relay in relays:
        await relay.close()
    await bus.close()


async def _door(pipe: Connection, config: EventBusConfig, records: list[WorkerRecord]) -> None:
    bus = _bus(config)
    indexer = KvIndexer(RouterConfig(kind="kv", block_size=BLOCK_SIZE), bus=bus)
    for record in records:
        await indexer.add(record)
    await asyncio.sleep(1.5)  # subscriptions are in force
    pipe.send(None)
    await asyncio.to_thread(pipe.recv)
    cpu_s = time.process_time()
    async with asyncio.timeout(600):
        while sum(one.messages for one in indexer.statistics().values()) < WORKERS * MESSAGES:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.2)
    pipe.send(time.process_time() - cpu_s)
    await indexer.close()
    await bus.close()


def _run_host(*arguments: Any) -> None:
    asyncio.run(_host(*arguments))


def _run_door(*arguments: Any) -> None:
    asyncio.run(_door(*arguments))


@contextmanager
def _process(target: Any, *arguments: Any) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.join(10)
        process.kill()


@contextmanager
def _nats_server() -> Iterator[tuple[NatsConfig, psutil.Process]]:
    beside = Path(sys.executable).with_name("nats-server")
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    if program is None:
        raise NotInstalledError("nats-server, which requirements-dev.txt brings")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [program, "-a", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
        )
        try:
            wait_until(lambda: _listens(port), "nats-server", 5.0, processes=[server])
            config = NatsConfig(kind="nats", servers=(f"nats://127.0.0.1:{port}",), cluster="bench")
            yield config, psutil.Process(server.pid)
        finally:
            server.kill()
            server.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


def measured(
    config: EventBusConfig, doors: int, server: psutil.Process | None = None
) -> dict[str, float]:
    """Microseconds of CPU for each message: of the engine, the host, the server, a front door."""
    with _process(_engines) as engines:
        records = [_record(number, source) for number, source in enumerate(engines.recv())]
        with _process(_run_host, config, records) as host:
            records = host.recv()
            readers = [_process(_run_door, config, records) for _ in range(doors)]
            pipes = [reader.__enter__() for reader in readers]
            for pipe in pipes:
                pipe.recv()
            server_s = _cpu_s(server)
            for pipe in (*pipes, host, engines):
                pipe.send(None)
            door_s = sum(pipe.recv() for pipe in pipes) / doors
            server_s = _cpu_s(server) - server_s
            for pipe in (host, engines):
                pipe.send(None)
            seconds = {
                "engine": engines.recv(),
                "host": host.recv(),
                "server": server_s,
                "door": door_s,
            }
            for reader in readers:
                reader.__exit__(None, None, None)
    return {name: spent * 1e6 / (WORKERS * MESSAGES) for name, spent in seconds.items()}


def _least(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: min(run[name] for run in runs) for name in runs[0]}


def run() -> list[Figure]:
    figures = []
    with _nats_server() as (nats, server):
        for doors in DOORS:
            zmq, over = [], []
            for number in range(ROUNDS):
                zmq.append(measured(EventBusConfig(kind="zmq"), doors))
                fresh = evolve(nats, cluster=f"bench-{doors}-{number}")
                over.append(measured(fresh, doors, server))
            ours, beside = _least(over), _least(zmq)
            what = {
                "engine": "engine's process",
                "host": "host's agent",
                "server": "NATS server",
                "door": "each front door",
            }
            figures += [
                Figure(
                    "events",
                    f"nats, {doors} front doors: {text}",
                    ours[name],
                    beside[name] or None,
                    "us",
                    "zmq",
                    higher_is_better=False,
                )
                for name, text in what.items()
            ]
    return figures

"""What the pod of a worker answers a kubelet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from commutator_kubernetes_tools import probes
from commutator_kubernetes_tools.probes import Probes


class Agent:
    def __init__(self, name: str) -> None:
        self.name = name
        self.ready = asyncio.Event()


class Fleet:
    def __init__(self, *names: str) -> None:
        self.all = [Agent(name) for name in names]

    def agents(self) -> list[Agent]:
        return self.all


class Supervisor:
    fleet: Any = None


@asynccontextmanager
async def serving(supervisor: Supervisor) -> AsyncIterator[tuple[Probes, asyncio.Task[None]]]:
    service = Probes(0, supervisor)
    running = asyncio.create_task(service.run())
    async with asyncio.timeout(5):
        while not service.port:
            await asyncio.sleep(0)
    try:
        yield service, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await service.stop()


async def ask(service: Probes, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: pod\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split(" ")[1]), answer.partition("\r\n\r\n")[2]


async def test_ready_means_that_every_worker_is() -> None:
    supervisor = Supervisor()
    async with serving(supervisor) as (service, running):
        assert (await ask(service, "/live"))[0] == 200
        assert (await ask(service, "/ready"))[0] == 503  # no worker is known yet
        fleet = supervisor.fleet = Fleet("pod-w-0", "pod-w-1")
        fleet.all[0].ready.set()
        status, body = await ask(service, "/ready")
        assert (status, body) == (
            503,
            '{"ready": false, "draining": false, "waiting_for": ["pod-w-1"]}',
        )
        fleet.all[1].ready.set()
        assert (await ask(service, "/ready"))[0] == 200
        assert (await ask(service, "/other"))[0] == 404
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert (await ask(service, "/ready"))[0] == 503  # it drains
        assert (await ask(service, "/live"))[0] == 200
    assert service.port


async def test_those_who_send_nothing_or_too_much_keep_nobody_out(monkeypatch: Any) -> None:
    monkeypatch.setattr(probes, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(probes, "_MOST_CONNECTIONS", 3)
    async with serving(Supervisor()) as (service, _):
        silent = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(3)]
        async with asyncio.timeout(5):
            assert [await reader.read() for reader, _ in silent] == [b""] * 3
        for _, one in silent:
            one.close()
        assert (await ask(service, "/live"))[0] == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(b"x" * 100_000)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()

"""The agent of one front door: ready, silent, ended, and started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from attrs import evolve
from tests.support.supervised import IdleLauncher

from commutator.config.model import RuntimeConfig
from commutator.contract.launcher import LaunchedProcess, LaunchPlan
from commutator.supervisor.frontend_agent import FrontendAgent, Patience

PATIENCE = Patience(answer_s=0.1, between_s=0.02, misses=3, stop_s=0.7)
RUNTIME = RuntimeConfig(drain_timeout_s=40, restart_backoff_s=0.01)


class FakeProcess(LaunchedProcess):
    def __init__(self, graces_s: list[float], on_stop: Callable[[], None]) -> None:
        self.ended = asyncio.Event()
        self._graces_s = graces_s
        self._on_stop = on_stop

    async def wait(self) -> str:
        await self.ended.wait()
        return "exited with status 1"

    async def stop(self, grace_s: float) -> None:
        self._graces_s.append(grace_s)
        self._on_stop()


class FakeLauncher(IdleLauncher):
    """Also the front door: answers on its socket while it is ``well``."""

    def __init__(self) -> None:
        self.well = asyncio.Event()
        self.well.set()
        self.status = "200 OK"
        self.processes: list[FakeProcess] = []
        self.graces_s: list[float] = []
        self.asked = 0
        self.on_stop: Callable[[], None] = lambda: None

    async def start(self, name: str, plan: LaunchPlan) -> FakeProcess:
        self.processes.append(FakeProcess(self.graces_s, self.on_stop))
        return self.processes[-1]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readline()
            self.asked += 1
            await self.well.wait()
            writer.write(f"HTTP/1.0 {self.status}\r\n\r\n".encode())
        finally:
            writer.close()


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[FrontendAgent, FakeLauncher]]:
    launcher = FakeLauncher()
    server = await asyncio.start_unix_server(launcher.answer, folder / "frontend-0.sock")
    agent = FrontendAgent("frontend-0", RUNTIME, launcher, {}, folder / "c.json", PATIENCE)
    task = asyncio.create_task(agent.run())
    try:
        async with asyncio.timeout(10):
            await agent.ready.wait()
            yield agent, launcher
    finally:
        launcher.well.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()


async def until_started(launcher: FakeLauncher, times: int) -> None:
    while len(launcher.processes) < times:
        await asyncio.sleep(0.01)


async def test_one_that_hangs_is_started_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (agent, launcher):
        launcher.well.clear()
        await until_started(launcher, 2)
        assert launcher.graces_s == [0.7], "it is not given the time to finish what runs"
        assert not agent.ready.is_set()
        launcher.well.set()
        await agent.ready.wait()


async def test_one_that_is_slow_for_a_while_or_not_ready_is_left_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, launcher):
        launcher.well.clear()
        asked = launcher.asked
        while launcher.asked < asked + 2:
            await asyncio.sleep(0.01)
        launcher.well.set()
        launcher.status = "503 Service Unavailable"
        while launcher.asked < asked + 10:
            await asyncio.sleep(0.01)
        assert len(launcher.processes) == 1


async def test_one_that_ends_is_started_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, launcher):
        launcher.processes[0].ended.set()
        await until_started(launcher, 2)
        assert launcher.graces_s == [45.0]


async def test_one_that_does_not_answer_in_time_is_stopped_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The line comes before the stop, which may take seconds."""
    launcher = FakeLauncher()
    launcher.on_stop = lambda: seen.append([record.getMessage() for record in caplog.records])
    seen: list[list[str]] = []
    patience = evolve(PATIENCE, start_s=0.05)
    agent = FrontendAgent("frontend-0", RUNTIME, launcher, {}, tmp_path / "c.json", patience)
    task = asyncio.create_task(agent.run())
    async with asyncio.timeout(10):
        await until_started(launcher, 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert seen[0] == ["frontend-0 gave no answer within 0.05 s of its start; stopping it"]
    assert launcher.graces_s[0] == 0.7, "it serves nobody, so it needs no time to finish"
    assert any(
        "of its start; starting it again in " in each.getMessage() for each in caplog.records
    )

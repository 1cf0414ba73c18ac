"""The conformance suites for launchers: subclass one, define a launcher, run pytest."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from commutator.contract.launcher import (
    AgentLauncher,
    AgentPlan,
    AgentState,
    Launcher,
    LauncherContext,
    LaunchPlan,
    PlacedAgent,
)

_FOREVER = "import time; print('started', flush=True); time.sleep(600)"


def python_plan(code: str, *arguments: str, **env: str) -> LaunchPlan:
    """A plan that runs ``code`` in this Python."""
    return LaunchPlan(argv=(sys.executable, "-c", code, *arguments), address="", env=env)


class PrintedLines(list[tuple[str, str, str]]):
    """What the processes printed: process name, stream name and line."""

    def __init__(self) -> None:
        super().__init__()
        self._more = asyncio.Event()

    def line(self, process: str, stream: str, message: str) -> None:
        """Pass it as ``LauncherContext.on_line``."""
        self.append((process, stream, message))
        self._more.set()

    async def until(self, count: int = 1) -> None:
        """Wait until there are ``count`` lines. Raises TimeoutError after 30 s."""
        async with asyncio.timeout(30):
            while len(self) < count:
                self._more.clear()
                await self._more.wait()


@pytest.mark.asyncio
class LauncherContract:
    """What every launcher must do."""

    documented_in = "Launcher in docs/reference/contract/launcher.md"

    def make_launcher(self, context: LauncherContext) -> Launcher:
        """A launcher that is not open yet."""
        raise NotImplementedError("return a fresh instance of the launcher under test")

    @asynccontextmanager
    async def opened(self, folder: Path) -> AsyncIterator[tuple[Launcher, PrintedLines]]:
        """An open launcher, and the lines that its processes print."""
        printed = PrintedLines()
        context = LauncherContext(folder=folder, env=os.environ, on_line=printed.line)
        launcher = self.make_launcher(context)
        await launcher.open()
        try:
            yield launcher, printed
        finally:
            await launcher.close()

    async def test_both_streams_come_by_the_line(self, tmp_path: Path) -> None:
        code = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
        async with self.opened(tmp_path / "run") as (launcher, printed):
            process = await launcher.start("child", python_plan(code))
            assert (await process.wait()).startswith("exited with status 3")
            await process.stop(5)
        assert sorted(printed) == [("child", "stderr", "two"), ("child", "stdout", "one")]

    async def test_a_plan_adds_to_the_environment(self, tmp_path: Path) -> None:
        code = "import os; print(os.environ['ADDED'], 'PATH' in os.environ)"
        async with self.opened(tmp_path / "run") as (launcher, printed):
            process = await launcher.start("child", python_plan(code, ADDED="yes"))
            await process.wait()
            await process.stop(5)
        assert printed == [("child", "stdout", "yes True")]

    async def test_what_cannot_be_started_is_an_os_error(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path / "run") as (launcher, _):
            plan = LaunchPlan(argv=("/no/such/program",), address="")
            with pytest.raises(OSError, match="No such file"):
                await launcher.start("child", plan)

    async def test_stop_ends_a_process_and_wait_says_so(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path / "run") as (launcher, printed):
            process = await launcher.start("child", python_plan(_FOREVER))
            waiting = asyncio.create_task(process.wait())
            await printed.until()
            await process.stop(10)
            assert await waiting == await process.wait()

    async def test_a_process_that_ignores_the_request_is_ended_by_force(
        self, tmp_path: Path
    ) -> None:
        code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {_FOREVER}"
        async with self.opened(tmp_path / "run") as (launcher, printed):
            process = await launcher.start("child", python_plan(code))
            await printed.until()
            await process.stop(0.2)
            async with asyncio.timeout(10):
                await process.wait()

    @pytest.mark.parametrize(
        "end", [lambda launcher: launcher.kill_all(), lambda _: None], ids=["kill_all", "close"]
    )
    async def test_nothing_is_left_at_the_end(
        self, tmp_path: Path, end: Callable[[Launcher], None]
    ) -> None:
        folder = tmp_path / "run"
        folder.mkdir()
        async with self.opened(folder) as (launcher, printed):
            process = await launcher.start("child", python_plan(_FOREVER))
            await printed.until()
            end(launcher)
        async with asyncio.timeout(10):
            await process.wait()
        assert not folder.exists()
        await process.stop(1)

    async def test_places_to_listen_at_are_free_and_not_given_twice(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path / "run") as (launcher, _):
            places = [launcher.listen_at() for _ in range(20)]
        assert len(set(places)) == len(places)
        for place in places:
            socket.create_server(place).close()


def _text(file: Path) -> str:
    return file.read_text()


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.asyncio
class AgentLauncherContract:
    """What every launcher of agents must do. Its hosts share this machine's files."""

    documented_in = "AgentLauncher in docs/reference/contract/launcher.md"
    patience_s = 120.0
    """Longest wait for anything; only a failing test waits so long."""

    def make_launcher(self) -> AgentLauncher:
        """A launcher that is not open yet; each call is for the same cluster."""
        raise NotImplementedError("return a fresh instance of the launcher under test")

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[AgentLauncher]:
        """An open launcher; all agents of its cluster are removed at the end."""
        launcher = self.make_launcher()
        await launcher.open()
        try:
            yield launcher
        finally:
            for agent in await launcher.agents():
                await launcher.remove(agent.name, 10)
            await launcher.close()

    @asynccontextmanager
    async def placed(
        self, report: Path, **order: str
    ) -> AsyncIterator[tuple[AgentLauncher, dict[str, Any]]]:
        """An open launcher that has placed an agent, and what this was given."""
        async with self.opened() as launcher:
            await launcher.place(self.plan(report, **order))
            yield launcher, await self.reported(report)

    def plan(self, report: Path, name: str = "w-0", **order: str) -> AgentPlan:
        """An agent that reports to a file."""
        files = {"order.json": json.dumps({"report": str(report), **order})}
        return AgentPlan(
            name=name,
            engine="w",
            generation="a1",
            module="commutator_testing.stand_in_agent",
            files=files,
            grace_s=10,
        )

    async def until(self, look: Callable[[], Awaitable[Any]]) -> Any:
        """What ``look`` finds, once it finds something. Raises TimeoutError."""
        async with asyncio.timeout(self.patience_s):
            while not (found := await look()):  # noqa: ASYNC110 - another process decides
                await asyncio.sleep(0.1)
        return found

    async def reported(self, report: Path, other_than: int = 0) -> dict[str, Any]:
        """What the agent was given, once a process has said it that is not ``other_than``."""

        async def look() -> dict[str, Any] | None:
            try:
                given: dict[str, Any] = json.loads(_text(report))
            except FileNotFoundError:
                return None
            return given if given["pid"] != other_than else None

        given: dict[str, Any] = await self.until(look)
        return given

    async def only(self, launcher: AgentLauncher, state: AgentState) -> PlacedAgent:
        """The only agent there is, once it is in a state."""

        async def look() -> PlacedAgent | None:
            (agent,) = await launcher.agents()
            return agent if agent.state is state else None

        agent: PlacedAgent = await self.until(look)
        return agent

    async def gone(self, *pids: int) -> None:
        """Wait until no such process is left. Raises TimeoutError."""

        async def look() -> bool:
            return not any(map(_is_alive, pids))

        await self.until(look)

    async def test_an_agent_gets_its_files_and_addresses(self, tmp_path: Path) -> None:
        async with self.opened() as launcher:
            assert await launcher.agents() == []
            plan = self.plan(tmp_path / "r")
            await launcher.place(plan)
            given = await self.reported(tmp_path / "r")
            agent = await self.only(launcher, AgentState.RUNNING)
            assert (agent.name, agent.generation) == (plan.name, plan.generation)
            assert agent.host == given["address"]
            assert given["threads"] is None
            host, _, port = given["control"].rpartition(":")
            assert host
            assert int(port)

    async def test_an_agent_is_placed_once_and_found_by_the_next_launcher(
        self, tmp_path: Path
    ) -> None:
        plan = self.plan(tmp_path / "r")
        async with self.placed(tmp_path / "r") as (launcher, given):
            await launcher.place(plan)
            other = self.make_launcher()
            await other.open()
            try:
                await other.place(plan)
                assert [one.name for one in await other.agents()] == [plan.name]
            finally:
                await other.close()
            assert _is_alive(given["pid"])
            assert json.loads((tmp_path / "r").read_text()) == given

    async def test_an_agent_that_ends_is_started_again(self, tmp_path: Path) -> None:
        async with self.placed(tmp_path / "r") as (launcher, given):
            os.kill(given["pid"], signal.SIGKILL)
            again = await self.reported(tmp_path / "r", other_than=given["pid"])
            await self.gone(given["child"])
            agent = await self.only(launcher, AgentState.RUNNING)
            assert agent.cause is not None
            assert "SIGKILL" in agent.cause
            assert _is_alive(again["pid"])

    async def test_the_end_of_the_launchers_process_ends_the_agent(self, tmp_path: Path) -> None:
        """It is started again: by what started the process, or by a new launcher."""
        async with self.placed(tmp_path / "r") as (_, given):
            if given["parent"] == os.getpid():
                pytest.skip("this launcher's process is the test itself")
            os.kill(given["parent"], signal.SIGKILL)
            await self.gone(given["pid"], given["child"])
            await self.reported(tmp_path / "r", other_than=given["pid"])

    async def test_an_agent_is_asked_to_end_and_nothing_is_left(self, tmp_path: Path) -> None:
        async with self.placed(tmp_path / "r") as (launcher, given):
            await launcher.remove("w-0", 10)
            assert not _is_alive(given["pid"])
            await self.gone(given["child"])
            assert (tmp_path / "r.ended").exists()
            assert await launcher.agents() == []
            await launcher.remove("w-0", 10)

    async def test_one_whose_remover_is_gone_is_ending_until_it_is_removed(
        self, tmp_path: Path
    ) -> None:
        may_end = tmp_path / "may-end"
        async with self.placed(tmp_path / "r", ends_with=str(may_end)) as (launcher, given):
            other = self.make_launcher()
            await other.open()
            removing = asyncio.create_task(other.remove("w-0", self.patience_s))

            async def asked() -> bool:
                return (tmp_path / "r.ended").exists()

            await self.until(asked)
            removing.cancel()
            await asyncio.gather(removing, return_exceptions=True)
            await other.close()
            await self.only(launcher, AgentState.ENDING)
            may_end.touch()
            await self.gone(given["pid"], given["child"])
            await self.only(launcher, AgentState.ENDING)
            await launcher.remove("w-0", 10)
            assert await launcher.agents() == []

    async def test_one_that_can_never_start_says_why(self, tmp_path: Path) -> None:
        async with self.opened() as launcher:
            await launcher.place(self.plan(tmp_path / "r", problem="no such model"))
            agent = await self.only(launcher, AgentState.FAILED)
            assert agent.cause == "no such model"

    async def test_agents_are_told_apart_by_name_and_generation(self, tmp_path: Path) -> None:
        async with self.opened() as launcher:
            first = self.plan(tmp_path / "0")
            await launcher.place(first)
            await launcher.place(self.plan(tmp_path / "1", name="w-1"))
            kept = await self.reported(tmp_path / "1")
            await self.reported(tmp_path / "0")
            await launcher.remove("w-0", 10)
            await launcher.place(evolve(first, generation="b2"))
            found = {one.name: one.generation for one in await launcher.agents()}
            assert found == {"w-0": "b2", "w-1": "a1"}
            assert _is_alive(kept["pid"])

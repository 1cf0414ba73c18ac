"""The launcher itself: asks a driver process, which it starts again when that ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from attrs import asdict

from commutator.contract.launcher import AgentLauncher, AgentPlan, AgentState, PlacedAgent
from commutator.errors import LauncherError
from commutator_ray.config import RayConfig, Resources

log = logging.getLogger(__name__)

_CONNECT_S = 60.0
_ANSWER_S = 30.0
_REMOVE_S = 60.0
"""Beyond the agent's grace: Ray may take a while to see that an actor is gone."""
_LONGEST_LINE = 1 << 26
"""Bytes of an answer."""


class RayLauncher(AgentLauncher):
    """Places each agent in a detached actor, with a placement group of its own."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._driver: _DriverProcess | None = None
        self._connecting = asyncio.Lock()

    async def open(self) -> None:
        await self._connected()

    async def agents(self) -> Sequence[PlacedAgent]:
        try:
            found = await self._ask("agents", timeout_s=_ANSWER_S)
        except LauncherError:
            # A head that has begun anew, without its state, answers no driver of before.
            await self.close()
            raise
        return [PlacedAgent(**{**one, "state": AgentState(one["state"])}) for one in found]

    async def place(self, plan: AgentPlan) -> None:
        bundle = self._config.resources.get(plan.engine, Resources()).bundle()
        detached = self._config.lifetime == "detached"
        await self._ask("place", asdict(plan), bundle, detached, timeout_s=_ANSWER_S)

    async def remove(self, name: str, grace_s: float) -> None:
        await self._ask("remove", name, grace_s, timeout_s=grace_s + _REMOVE_S)

    async def close(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            await driver.close()

    async def _ask(self, name: str, *arguments: Any, timeout_s: float) -> Any:
        driver = await self._connected()
        try:
            async with asyncio.timeout(timeout_s):
                return await driver.ask(name, *arguments)
        except TimeoutError:
            problem = f"Ray at {self._config.address} did not answer within {timeout_s:g} s"
            raise LauncherError(problem) from None

    async def _connected(self) -> _DriverProcess:
        async with self._connecting:
            if self._driver is None or not self._driver.is_alive:
                if self._driver is not None:
                    await self._driver.close()
                self._driver = None
                self._driver = await _DriverProcess.start(self._config)
            return self._driver


class _DriverProcess:
    """The child process; see ``commutator_ray.driver``."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self._process = process
        self._address = address
        self._numbers = itertools.count(1)
        self._connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions: dict[int, asyncio.Future[Any]] = {0: self._connected}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, config: RayConfig) -> _DriverProcess:
        """Start it, and wait until it is connected. Raises LauncherError."""
        argv = (sys.executable, "-m", "commutator_ray.driver")
        process = await asyncio.create_subprocess_exec(
            *argv,
            config.address,
            f"commutator-{config.cluster}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE,
            start_new_session=True,  # Ctrl-C is for the supervisor
        )
        driver = cls(process, config.address)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await driver._connected
        except (TimeoutError, LauncherError) as error:
            await driver.close()
            problem = (
                f"launcher.address: no connection to the Ray cluster at {config.address}: "
                f"{str(error) or 'no answer'}; start Ray on this machine (`ray start`), or name "
                "its head, HOST:PORT"
            )
            raise LauncherError(problem) from None
        return driver

    @property
    def is_alive(self) -> bool:
        return not self._reading.done()

    async def ask(self, name: str, *arguments: Any) -> Any:
        """Its answer. Raises LauncherError."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        if not self.is_alive:
            raise self._ended()
        self._questions[number] = answer
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{json.dumps([number, name, arguments])}\n".encode())
            return await answer
        finally:
            self._questions.pop(number, None)

    async def close(self) -> None:
        """End it. Idempotent."""
        self._reading.cancel()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(ProcessLookupError):
            self._process.kill()  # actors and placement groups are detached
        await self._process.wait()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                number, ok, result = json.loads(line)
                answer = self._questions.get(number)
                if answer is None or answer.done():
                    continue
                if ok:
                    answer.set_result(result)
                else:
                    answer.set_exception(LauncherError(f"Ray at {self._address}: {result}"))
        finally:
            for answer in self._questions.values():
                if not answer.done():
                    answer.set_exception(self._ended())

    def _ended(self) -> LauncherError:
        return LauncherError(f"the connection to Ray at {self._address} was lost")

"""An engine and a launcher without processes, for tests of the supervisor."""

from __future__ import annotations

import asyncio
import time

from commutator.contract.engine import (
    EngineClient,
    EngineConfig,
    EngineConnector,
    LaunchContext,
    TokenStream,
)
from commutator.contract.launcher import LaunchedProcess, Launcher, LaunchPlan
from commutator.contract.request import GenerateRequest
from commutator.contract.worker import EngineInfo, EngineLoad
from commutator.errors import EngineUnavailableError

INFO = EngineInfo(
    kind="fake", version="1", model="m", max_model_len=1, block_size=1, kv_capacity_blocks=1
)


class FakeEngine(EngineConnector[EngineConfig], EngineClient):
    """Connector and client in one; the test decides what it answers."""

    def __init__(self, argv: tuple[str, ...] | None) -> None:
        self.argv = argv
        self.well = True
        self.info = INFO
        self.starts = 0
        self.contexts: list[LaunchContext] = []
        self.launch_error: Exception | None = None
        self.health_error: Exception = EngineUnavailableError("silent")

    def launch_plan(self, config: EngineConfig, context: LaunchContext) -> LaunchPlan | None:
        self.contexts.append(context)
        if self.launch_error is not None:
            raise self.launch_error
        if self.argv is None:
            return None
        return LaunchPlan(argv=self.argv, address=f"{context.host}:{context.port}")

    def attach_address(self, config: EngineConfig) -> str:
        return "elsewhere:1"

    def connect(self, config: EngineConfig, address: str) -> EngineClient:
        return self

    async def start(self) -> EngineInfo:
        self.starts += 1
        if not self.well:
            raise EngineUnavailableError("refused")
        return self.info

    async def check_health(self) -> None:
        if not self.well:
            raise self.health_error

    async def load(self) -> EngineLoad:
        return EngineLoad()

    def generate(self, request: GenerateRequest) -> TokenStream:
        raise NotImplementedError

    async def close(self) -> None:
        raise RuntimeError("a close that fails must not matter")


class IdleLauncher(Launcher):
    """Has nothing to open or close; tests override ``start``."""

    async def open(self) -> None:
        pass

    def listen_at(self, *, loopback: bool = False) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def start(self, name: str, plan: LaunchPlan) -> LaunchedProcess:
        raise NotImplementedError

    def kill_all(self) -> None:
        pass

    async def close(self) -> None:
        pass


class FakeProcess(LaunchedProcess):
    """Lives until the test calls ``die`` or its supervisor stops it."""

    def __init__(self, cpu_of_time: float | None = None) -> None:
        self.ended = asyncio.Event()
        self.stopped = False
        self._cpu_of_time = cpu_of_time
        self._began_s = time.monotonic()

    def cpu_s(self) -> float | None:
        if self._cpu_of_time is None:
            return None
        return self._cpu_of_time * (time.monotonic() - self._began_s)

    def die(self) -> None:
        self.ended.set()

    async def wait(self) -> str:
        await self.ended.wait()
        return "was killed by SIGKILL"

    async def stop(self, grace_s: float) -> None:
        self.stopped = True
        self.ended.set()


class FakeLauncher(IdleLauncher):
    """Starts fake processes, each at a port of its own; refuses the program "/no/such/program"."""

    def __init__(self) -> None:
        self.processes: list[FakeProcess] = []
        self.plans: list[LaunchPlan] = []
        """Of the processes, in the same order."""
        self.cpu_of_time: float | None = None
        """Of the processes that are started from now on."""
        self._port = 1000

    def listen_at(self, *, loopback: bool = False) -> tuple[str, int]:
        self._port += 1
        return "127.0.0.1", self._port

    async def start(self, name: str, plan: LaunchPlan) -> FakeProcess:
        if plan.argv == ("/no/such/program",):
            raise FileNotFoundError(2, "No such file or directory", plan.argv[0])
        self.processes.append(FakeProcess(self.cpu_of_time))
        self.plans.append(plan)
        return self.processes[-1]

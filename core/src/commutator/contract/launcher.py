"""Launchers: how processes are started and stopped, on this machine or on hosts of a cluster."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from attrs import field, frozen

from commutator.contract.settings import PositiveSeconds, setting

__all__ = [
    "AgentLauncher",
    "AgentLauncherConfig",
    "AgentPlan",
    "AgentState",
    "LaunchPlan",
    "LaunchedProcess",
    "Launcher",
    "LauncherConfig",
    "LauncherContext",
    "PlacedAgent",
]


@frozen(kw_only=True)
class LaunchPlan:
    """One process to start: a worker or a front door."""

    argv: tuple[str, ...]
    """The program and its arguments."""
    address: str
    """Where it will listen; for a worker, the argument of ``EngineConnector.connect``."""
    env: Mapping[str, str] = field(factory=dict)
    """Environment variables added to those of ``LauncherContext.env``."""
    drain_s: float = 0.0
    """Seconds that it may take to end by SIGTERM, before the others, if the supervisor has died."""


@frozen(kw_only=True)
class LauncherConfig:
    """Options of every launcher; each launcher plugin adds its own."""

    kind: str = setting("The launcher plugin.")


@frozen(kw_only=True)
class LauncherContext:
    """What a launcher gets for one run of a deployment."""

    folder: Path
    """Sockets and scratch files of the run. The launcher removes it after the last process."""
    env: Mapping[str, str]
    """The environment of every process, before its plan's own variables."""
    listen: str = "127.0.0.1"
    """The IP address at which processes listen, as `cluster.host.listen`."""
    on_line: Callable[[str, str, str], None]
    """Call it with process name, "stdout" or "stderr", and each line that a process prints.

    It never blocks. Call it in the event loop.
    """


class LaunchedProcess(ABC):
    """A process that a launcher started, until it has ended."""

    pid: int | None = None
    """Its id, where it runs on this machine."""

    @abstractmethod
    async def wait(self) -> str:
        """Wait until the process ends; returns how, as "exited with status 1".

        What the process said last may follow: "exited with status 1: no memory". May be called
        again, also after the end.
        """

    @abstractmethod
    async def stop(self, grace_s: float) -> None:
        """Ask the process to end; end it by force, with its children, after ``grace_s`` seconds.

        Returns when the process and its children have ended. Called once for every process, also
        for one that has ended already, because its children may still run.
        """

    def cpu_s(self) -> float | None:
        """CPU time of the process and its children, in seconds; None where it cannot be seen."""
        return None

    async def end_when_it_hangs(self, ask: Callable[[], Awaitable[object]] | None = None) -> str:
        """Wait until the process hangs, end it by force, and return what it did.

        It hangs when it is stopped, or answers ``ask`` with nothing and does nothing either: one
        that computes, or waits for a CPU, does not hang. A launcher that cannot see that waits
        for ever, as this one does. Cancelled when somebody else finds that it has ended.
        """
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never


class Launcher(ABC):
    """Starts the processes of one run of a deployment. Used from one event loop.

    The processes also end when the supervisor ends in any way, SIGKILL included.
    """

    @abstractmethod
    async def open(self) -> None:
        """Prepare to start processes. Called once, before the first ``start``."""

    @abstractmethod
    def listen_at(self, *, loopback: bool = False) -> tuple[str, int]:
        """``LauncherContext.listen``, and a free TCP port there for a process about to be started.

        With ``loopback``, the loopback interface instead. No port is given twice in a row.
        """

    @abstractmethod
    async def start(self, name: str, plan: LaunchPlan) -> LaunchedProcess:
        """Start a process; ``name`` marks its lines of output. Raises OSError if it cannot."""

    @abstractmethod
    def kill_all(self) -> None:
        """End every process by force, now."""

    @abstractmethod
    async def close(self) -> None:
        """End every process, and remove ``LauncherContext.folder``. Idempotent."""


# ------------------------------------------------------------- hosts of a cluster


@frozen(kw_only=True)
class AgentLauncherConfig(LauncherConfig):
    """Options of every launcher that places agents; each such plugin adds its own."""

    places_groups: ClassVar[bool] = False
    """Whether it places plans with several ``AgentPlan.nodes``."""

    cluster: str = setting(
        "Agents of other clusters are left alone; `cluster.name` by default.", "default"
    )
    cut_off_s: PositiveSeconds = setting(
        "A worker is stopped when its host has reached neither the registry nor the launcher's own "
        "cluster for this long, because another host may have replaced it.",
        30.0,
    )


@frozen(kw_only=True)
class AgentPlan:
    """An agent: a process that runs one worker on whichever host the launcher chooses.

    The host's own Python runs ``python -m MODULE FOLDER ADDRESS CONTROL``: a private folder with
    ``files``, the IP address at which others reach the host, and HOST:PORT where the launcher's
    cluster answers TCP connections for as long as the host is not cut off from it. SIGTERM lets the
    agent end.
    """

    name: str
    """Unique in the cluster: letters, digits, '.', '_' and '-'."""
    engine: str
    """The name of the `engines` entry; the launcher's options may say what its workers need."""
    generation: str
    """Differs between plans of one name that start different things; hexadecimal digits."""
    module: str
    """The Python module that is the agent."""
    files: Mapping[str, str] = field(factory=dict, repr=False)
    """The contents of text files by name. They hold no secret."""
    grace_s: float
    """Seconds that the agent may take to end after SIGTERM, before it is killed."""
    nodes: int = 1
    """On how many hosts the worker runs, an agent on each. The launcher puts beside ``files``
    a `group.json` with the fields of a ``NodeGroup``, and starts and ends them together."""


class AgentState(StrEnum):
    """What an agent does."""

    WAITING = "waiting"
    """For a host with room for it, or for its host to answer."""
    RUNNING = "running"
    """Its process runs, or is about to be started again."""
    FAILED = "failed"
    """Its process has ended and said that no further start can succeed."""
    ENDING = "ending"
    """``remove`` was called and has not returned, perhaps because its caller has ended: the agent
    runs no more, or not for long, and is still to be removed."""


@frozen(kw_only=True)
class PlacedAgent:
    """An agent as its launcher knows it."""

    name: str
    """As ``AgentPlan.name``."""
    generation: str
    """As ``AgentPlan.generation``; empty for what is left of an agent that was placed half."""
    state: AgentState
    """What it does."""
    host: str = ""
    """The address of its host; empty while it has none."""
    cause: str | None = None
    """What it waits for, why it ended last, or why it failed; for people."""


class AgentLauncher(ABC):
    """Runs agents on the hosts of a cluster, each at most once. Used from one event loop.

    Agents outlive the process that launched them: the next one finds them in ``agents``. One whose
    process ends is started again on its host, with a back-off; one whose host is lost, on another.
    When the launcher's own process on a host ends in any way, the agent and its children do, too.
    """

    @abstractmethod
    async def open(self) -> None:
        """Connect to the cluster. Raises LauncherError when it cannot be reached."""

    @abstractmethod
    async def agents(self) -> Sequence[PlacedAgent]:
        """Every agent of the cluster, also those that others placed. Raises LauncherError."""

    @abstractmethod
    async def place(self, plan: AgentPlan) -> None:
        """Have an agent started as soon as a host has room. Raises LauncherError.

        Does nothing if there is one of that name and generation. The plan is kept for as long as
        the agent exists.
        """

    @abstractmethod
    async def remove(self, name: str, grace_s: float) -> None:
        """End an agent within ``grace_s`` and forget it; return when nothing of it runs any more.

        On a host that cannot be reached it may still run: see ``AgentLauncherConfig.cut_off_s``.
        Does nothing if there is none. Raises LauncherError.
        """

    @abstractmethod
    async def close(self) -> None:
        """Disconnect; agents are left running. Idempotent."""

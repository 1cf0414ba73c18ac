"""Launchers: how processes are started and stopped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import field, frozen

from commutator.contract.settings import setting

__all__ = [
    "LaunchPlan",
    "LaunchedProcess",
    "Launcher",
    "LauncherConfig",
    "LauncherContext",
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


class Launcher(ABC):
    """Starts the processes of one run of a deployment. Used from one event loop.

    The processes also end when the supervisor ends in any way, SIGKILL included.
    """

    @abstractmethod
    async def open(self) -> None:
        """Prepare to start processes. Called once, before the first ``start``."""

    @abstractmethod
    def listen_at(self) -> tuple[str, int]:
        """``LauncherContext.listen``, and a free TCP port there for a process about to be started.

        No port is given twice in a row.
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

"""What runs beside the supervisor with a life of its own, and speaks with the front doors.

A ledger of limits is one, and the loop of a planner: there is one of each for all front doors of a
deployment. It outlives every front door, as it runs in the supervisor's process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Connection", "Hub", "Receiver", "Service"]


class Connection(Protocol):
    """One end of a connection between a front door and what runs beside the supervisor.

    A frame is an array that MessagePack can express; its first element is the service's name.
    """

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were sent and that the system has not accepted yet: a slow reader has many."""

    def send(self, frame: list[Any]) -> None:
        """Write one frame, soon. Dropped silently when the connection has ended."""

    def close(self) -> None:
        """End the connection, after what was sent. Idempotent."""


class Hub(Protocol):
    """The way of a front door to the services beside the supervisor that it shares with others."""

    async def connect(
        self, on_frame: Callable[[list[Any]], None], on_lost: Callable[[], None]
    ) -> Connection:
        """Connect, once it is known where. Raises ``commutator.errors.RegistryError``.

        ``on_frame`` takes each frame that comes, and must not raise; ``on_lost`` is called once
        when the connection has ended, also when another host has become the hub: connect again.
        """


class Receiver(ABC):
    """Takes what comes on one connection."""

    @abstractmethod
    def on_frame(self, frame: list[Any]) -> None:
        """A frame came; its first element is the service's name, and others follow.

        Raises ValueError or TypeError for a frame that no front door sends: it is logged, and the
        connection is closed.
        """

    def on_lost(self) -> None:
        """The connection has ended, once. Not called when nothing came on it. Default: nothing."""


class Service(ABC):
    """Runs beside the supervisor, in its process and on its event loop: nothing may block that.

    Front doors reach it on the port of the supervisor's registry; where front doors of several
    hosts share, on the port of the host that is their hub.
    """

    name: str
    """The first element of each frame to and from it; no two services have the same."""

    @abstractmethod
    def connected(self, connection: Connection) -> Receiver:
        """A front door sent its first frame on a connection: returns what takes it and the next.

        A service that tells connections apart makes one receiver for each.
        """

    async def run(self) -> None:
        """Work until cancelled, which is when the deployment begins to end. Default: nothing.

        Front doors that finish their requests still connect, and use what is connected. An
        exception ends the deployment, with its text.
        """

    async def stop(self) -> None:
        """Called once, after ``run`` was cancelled and the last connection ended."""

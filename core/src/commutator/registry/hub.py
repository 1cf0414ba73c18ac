"""Where the front doors of a deployment share their loads and count against limits.

On one machine it is the supervisor's server. In a cluster of several hosts it is the host that
serves the registry of kind `memory`, or with any other registry the one that holds the claim
``HUB``: when that host is lost, another one takes the claim as soon as the lease has lapsed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar
from weakref import WeakSet

from commutator.contract.registry import RegistryConfig
from commutator.contract.service import Connection
from commutator.errors import RegistryError
from commutator.frames import FrameProtocol
from commutator.registry.claims import HUB
from commutator.registry.client import RECONNECT, connect
from commutator.registry.memory import MemoryConfig
from commutator.trust import Network

log = logging.getLogger(__name__)

_OnFrame = Callable[[list[Any]], None]
ConnectionT = TypeVar("ConnectionT", bound=Connection)


async def connections(
    connect: Callable[[_OnFrame, Callable[[], None]], Awaitable[ConnectionT]],
    on_frame: _OnFrame,
    what: str,
    level: int = logging.WARNING,
) -> AsyncGenerator[tuple[ConnectionT, asyncio.Event], None]:
    """One connection after another, each with an event that is set when it is lost.

    Each is closed when the next one is asked for, which comes after a pause. ``connect`` as
    ``Hub.connect``; the first of several failures in a row is logged at ``level``, about ``what``.
    """
    backoff = RECONNECT
    while True:
        lost = asyncio.Event()
        try:
            connection = await connect(on_frame, lost.set)
        except RegistryError as error:
            log.log(logging.DEBUG if backoff.failures else level, "%s: %s", what, error)
        else:
            backoff = RECONNECT
            try:
                yield connection, lost
            finally:
                connection.close()
        backoff, wait_s = backoff.after_failure(0.0)
        await asyncio.sleep(wait_s)


class Hub:
    """The way to the hub; follows the claim when another host takes it."""

    def __init__(self, address: str | None = None, *, spans_hosts: bool = False) -> None:
        """``address`` is its "HOST:PORT"; None: the first claim will say."""
        self.spans_hosts = spans_hosts
        """Whether front doors of other hosts share there, too."""
        self._address = address
        self._known = asyncio.Event()
        if address is not None:
            self._known.set()
        self._connections: WeakSet[FrameProtocol] = WeakSet()

    def on_claim(self, name: str, address: str) -> None:
        """A host holds a name in the registry. Ends the connections to the former hub."""
        if name == HUB and address != self._address:
            self._address = address
            self._known.set()
            for connection in list(self._connections):
                connection.close()

    async def connect(
        self, on_frame: Callable[[list[Any]], None], on_lost: Callable[[], None]
    ) -> FrameProtocol:
        """Wait until it is known which host is the hub, and connect. Raises RegistryError."""
        await self._known.wait()
        assert self._address is not None
        address = self._address
        connection = await connect(address, on_frame, on_lost)
        self._connections.add(connection)
        if address != self._address:
            connection.close()  # it moved meanwhile; ``on_lost`` is called, and connects anew
        return connection


def hub_of(registry: RegistryConfig, network: Network | None, here: str) -> Hub:
    """The hub for a front door of this host, whose supervisor serves at ``here``, "HOST:PORT"."""
    address = registry.address if isinstance(registry, MemoryConfig) else None
    if network is None or (registry.kind == "memory" and address is None):
        return Hub(here)
    return Hub(address, spans_hosts=True)

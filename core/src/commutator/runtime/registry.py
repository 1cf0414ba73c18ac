"""Which workers live: the contract of a registry, and the one that lives in a process's memory."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence

from commutator.runtime.lease import (
    Change,
    Deregister,
    Event,
    KeepAlive,
    LeaseTable,
    Register,
    SetDraining,
    SetRole,
    Tick,
    Up,
    step,
)
from commutator.types import Role, WorkerRecord

__all__ = ["MemoryRegistry", "Registry"]


class Registry(ABC):
    """Where workers are announced and found. Used from one event loop.

    Methods but ``watch`` and ``close`` raise RegistryError when the registry cannot be reached.
    """

    @abstractmethod
    async def register(self, record: WorkerRecord, ttl_s: float) -> int:
        """Announce a worker. Returns the id of its lease, which lapses after ``ttl_s``."""

    @abstractmethod
    async def keep_alive(self, lease_id: int) -> bool:
        """Start the lease's time anew. False when it lapsed: register again."""

    @abstractmethod
    async def deregister(self, lease_id: int, reason: str) -> None:
        """End the lease now; nothing happens when it lapsed already."""

    @abstractmethod
    async def set_draining(self, worker_id: str, draining: bool) -> bool:
        """Keep new requests from a worker, or let them come again. False: there is no such worker.

        It holds until it is taken back, even if the worker is started again meanwhile.
        """

    @abstractmethod
    async def set_role(self, worker_id: str, role: Role) -> bool:
        """Change which phase of requests a worker is sent. False: there is no such worker.

        It holds until it is changed again, even if the worker is started again meanwhile.
        """

    @abstractmethod
    def watch(self) -> AsyncIterator[Sequence[Change]]:
        """Batches of changes, without end. The first holds every live worker as ``Up``.

        While the registry cannot be reached nothing comes; after that, the differences.
        """

    @abstractmethod
    async def close(self) -> None:
        """Disconnect. Leases stay until they lapse. Idempotent."""


class MemoryRegistry(Registry):
    """A lease table with a clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._table = LeaseTable()
        self._watchers: set[asyncio.Queue[Sequence[Change]]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def register(self, record: WorkerRecord, ttl_s: float) -> int:
        self._step(Register(record, ttl_s))
        return self._table.last_id

    async def keep_alive(self, lease_id: int) -> bool:
        return self._step(KeepAlive(lease_id))

    async def deregister(self, lease_id: int, reason: str) -> None:
        self._step(Deregister(lease_id, reason))

    async def set_draining(self, worker_id: str, draining: bool) -> bool:
        return self._step(SetDraining(worker_id, draining))

    async def set_role(self, worker_id: str, role: Role) -> bool:
        return self._step(SetRole(worker_id, role))

    async def watch(self) -> AsyncIterator[Sequence[Change]]:
        queue: asyncio.Queue[Sequence[Change]] = asyncio.Queue()
        self._step(Tick())
        queue.put_nowait([Up(record) for record in self._table.records()])
        self._watchers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._watchers.discard(queue)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _step(self, event: Event) -> bool:
        self._table, changes, found = step(self._table, event, self._clock())
        if changes:
            for queue in self._watchers:
                queue.put_nowait(changes)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (expiry := self._table.next_expiry()) is not None:
            wait_s = max(0.0, expiry - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._step, Tick())
        return found

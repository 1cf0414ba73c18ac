"""One worker's presence in the registry."""

from __future__ import annotations

import logging

from commutator.errors import RegistryError
from commutator.runtime.registry import Registry
from commutator.types import WorkerRecord

__all__ = ["WorkerLease"]

log = logging.getLogger(__name__)


class WorkerLease:
    """Held by whoever looks after the worker, and renewed only while the worker is well."""

    def __init__(self, registry: Registry, lease_s: float) -> None:
        self._registry = registry
        self._lease_s = lease_s
        self._lease_id: int | None = None

    async def announce(self, record: WorkerRecord) -> None:
        """Begin the lease. Raises RegistryError."""
        self._lease_id = await self._registry.register(record, self._lease_s)

    async def renew(self, record: WorkerRecord) -> None:
        """Start the lease's time anew; announce the worker again if it had lapsed."""
        try:
            if self._lease_id is None or not await self._registry.keep_alive(self._lease_id):
                await self.announce(record)
                log.info("%s is back in the registry", record.worker_id)
        except RegistryError as error:
            log.warning("%s cannot be kept in the registry: %s", record.worker_id, error)

    async def withdraw(self, reason: str) -> None:
        """End the lease now. Idempotent."""
        lease_id, self._lease_id = self._lease_id, None
        if lease_id is not None:
            try:
                await self._registry.deregister(lease_id, reason)
            except RegistryError as error:
                log.warning("%s; the lease will lapse by itself", error)

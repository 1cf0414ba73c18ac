"""Registries: how workers are announced and found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

from attrs import frozen

from commutator.contract.settings import setting
from commutator.contract.worker import Role, WorkerRecord

__all__ = [
    "CLAIM_TTLS",
    "LAPSED",
    "RETIRED",
    "Change",
    "Registry",
    "RegistryConfig",
    "WorkerDown",
    "WorkerUp",
]

CLAIM_TTLS = 2.0
"""How many ``ttl_s`` ``Registry.register`` waits for another instance to give the name up."""

LAPSED = "lease expired"
"""The ``WorkerDown.reason`` of a worker whose lease lapsed."""

RETIRED = "retired"
"""The ``WorkerDown.reason`` of a worker that was stopped for good; see ``Registry.deregister``."""


@frozen(kw_only=True)
class RegistryConfig:
    """Options of every registry; each registry plugin adds its own."""

    kind: str = setting("The registry plugin.")


@frozen(kw_only=True)
class WorkerUp:
    """A worker got a lease, or the record of a worker with a lease changed."""

    record: WorkerRecord
    """The complete record, with the role and the draining that the registry holds."""


@frozen(kw_only=True)
class WorkerDown:
    """A worker has no lease any more."""

    worker_id: str
    """The worker that left."""
    reason: str
    """"lease expired", "stopped", "draining", "failed" or "retired"."""


Change = WorkerUp | WorkerDown
"""What a batch of ``Registry.watch`` holds."""


class Registry(ABC):
    """Where workers are announced and found.

    The factory of a registry plugin makes one in the supervisor's process, which serves it to the
    front doors. It is used from one event loop. Every method but ``watch`` and ``close`` raises
    RegistryError when the registry cannot be reached.
    """

    @abstractmethod
    async def register(self, record: WorkerRecord, ttl_s: float) -> int:
        """Announce a worker, and return the id of its lease, which no other lease has.

        The lease lapses ``ttl_s`` seconds after this call or the last ``keep_alive``; a registry
        may round ``ttl_s`` up. The worker id is claimed for ``record.instance``: a live lease of
        that instance is replaced, and watchers get a ``WorkerUp`` if the record differs, after a
        ``WorkerDown`` "failed" if the address does. While another instance holds the worker id,
        this waits, at most ``CLAIM_TTLS`` times ``ttl_s``; then it raises NameTakenError.
        """

    @abstractmethod
    async def keep_alive(self, lease_id: int) -> bool:
        """Renew the lease for its ``ttl_s``. False when it lapsed: register again.

        RegistryError means that nobody knows: the worker goes on serving, and asks again.
        """

    @abstractmethod
    async def deregister(self, lease_id: int, reason: str) -> None:
        """End the lease now; watchers get ``reason``. Does nothing when it has lapsed.

        With the reason ``RETIRED``, draining and a role that were set for the worker id end, too:
        the worker will not come back, and another one may get its id.
        """

    @abstractmethod
    async def set_draining(self, worker_id: str, draining: bool) -> bool:
        """Stop sending new requests to a worker, or send them again. False: no such worker.

        Applies to the worker's later leases, too, until it is set again.
        """

    @abstractmethod
    async def set_role(self, worker_id: str, role: Role) -> bool:
        """Change which phase of requests a worker is sent. False: no such worker.

        Applies to the worker's later leases, too, until it is set again.
        """

    @abstractmethod
    def watch(self) -> AsyncIterator[Sequence[Change]]:
        """Batches of changes, in their order, without end.

        The first batch comes at once and holds every live worker as ``WorkerUp``; it is empty when
        there is none. While the registry cannot be reached, no batch comes, and ``view_age_s``
        grows; afterwards, one with the differences.
        """

    def view_age_s(self) -> float | None:
        """Seconds since the registry last confirmed that watchers have every change.

        Infinite before the first time. Silence is not "no change": a view is as old as this says.
        None, as here: the registry does not tell.
        """
        return None

    @abstractmethod
    async def close(self) -> None:
        """Disconnect. Leases last until they lapse. Idempotent."""

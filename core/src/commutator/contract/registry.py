"""Registries: how workers are announced and found."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

from attrs import frozen

from commutator.contract.settings import setting
from commutator.contract.worker import Role, WorkerRecord
from commutator.errors import RegistryError

__all__ = [
    "CLAIM_TTLS",
    "LAPSED",
    "MAX_DOCUMENT_BYTES",
    "RETIRED",
    "Change",
    "Document",
    "Registry",
    "RegistryConfig",
    "WorkerDown",
    "WorkerUp",
    "check_document",
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

MAX_DOCUMENT_BYTES = 512 << 10
"""Longest value of a document."""

_DOCUMENT_NAME = re.compile("[a-z0-9][a-z0-9._/-]{0,127}")


@frozen(kw_only=True)
class Document:
    """A named value that a deployment keeps in its registry."""

    name: str
    """1 to 128 of the characters a-z, 0-9 and ``._/-``, a letter or digit first."""
    version: int
    """Above 0, and another one after each write, also after it was deleted between."""
    value: bytes
    """Up to ``MAX_DOCUMENT_BYTES``; the registry does not look into it."""


def check_document(name: str, value: bytes = b"") -> None:
    """Raise ValueError for a name or a value that no document can have."""
    if not _DOCUMENT_NAME.fullmatch(name):
        raise ValueError(
            f"document {name!r:.80}: expected 1 to 128 of a-z 0-9 . _ / -, a letter or digit first"
        )
    if len(value) > MAX_DOCUMENT_BYTES:
        raise ValueError(
            f"document {name}: {len(value)} bytes, and at most {MAX_DOCUMENT_BYTES} are kept"
        )


class Registry(ABC):
    """Where workers are announced and found, and what a deployment agrees on is kept.

    Several may change a document at the same time: each reads it, and writes what follows from it
    if it is still as it was read; otherwise it reads again.

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

    async def read_document(self, name: str) -> Document | None:
        """The document as it is now; None: there is none. Raises ValueError for a wrong name."""
        raise self._without_documents(name)

    async def write_document(self, name: str, value: bytes, *, expected: int) -> int | None:
        """Store a document if its version is ``expected``; 0: if there is none.

        Returns the new version; None: it was not as expected, and nothing has changed.
        RegistryError means that nobody knows: read it again. Raises ValueError for a name or value
        that is not legal; see ``Document``.
        """
        raise self._without_documents(name)

    async def delete_document(self, name: str, *, expected: int) -> bool:
        """Delete a document if its version is ``expected``. False: it was not. Raises ValueError.

        RegistryError means that nobody knows.
        """
        raise self._without_documents(name)

    def watch_document(self, name: str) -> AsyncIterator[Document | None]:
        """The document as it is now, at once, and then after changes, without end; None: none.

        What was replaced before it was read may be left out, the latest state is not. While the
        registry cannot be reached, nothing comes. Raises ValueError for a wrong name.
        """
        raise self._without_documents(name)

    def _without_documents(self, name: str) -> RegistryError:
        check_document(name)
        return RegistryError(
            f"document {name}: {type(self).__name__} keeps no documents (contract 0.2); use the "
            "registry memory or etcd, or another version of its plugin"
        )

    def view_age_s(self) -> float | None:
        """Seconds since the registry last confirmed that watchers have every change.

        Infinite before the first time. Silence is not "no change": a view is as old as this says.
        None, as here: the registry does not tell.
        """
        return None

    @abstractmethod
    async def close(self) -> None:
        """Disconnect. Leases last until they lapse. Idempotent."""

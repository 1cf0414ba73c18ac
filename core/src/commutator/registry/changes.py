"""The changes between two views of a registry, their way to its watchers, and seals.

A seal proves that a process of the run wrote a value that is kept outside of it: who else can write
to the store, such as other users of the same etcd, cannot announce a worker, or drain one. It hides
nothing, and does not keep an old value from being put back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hmac import compare_digest

from commutator.contract.registry import LAPSED, Change, WorkerDown, WorkerUp
from commutator.contract.worker import WorkerRecord
from commutator.trust import proof_of_run


def description(holder: WorkerRecord) -> str:
    """Where the worker is that has a worker id, for people."""
    return f"host {holder.host or 'without a name'}, at {holder.address}"


def succession(known: WorkerRecord | None, record: WorkerRecord) -> list[Change]:
    """The changes when ``record`` takes the place of ``known``; None: of no worker.

    Another instance or address is another process: the one before has failed.
    """
    if known == record:
        return []
    up = WorkerUp(record=record)
    if known is not None and (known.instance, known.address) != (record.instance, record.address):
        return [WorkerDown(worker_id=known.worker_id, reason="failed"), up]
    return [up]


def difference(known: Mapping[str, WorkerRecord], present: Sequence[WorkerRecord]) -> list[Change]:
    """The changes that turn the view ``known`` into ``present``."""
    ids = {record.worker_id for record in present}
    changes: list[Change] = [
        WorkerDown(worker_id=worker_id, reason=LAPSED)
        for worker_id in known
        if worker_id not in ids
    ]
    for record in present:
        changes += succession(known.get(record.worker_id), record)
    return changes


class Watchers:
    """Everyone who watches a registry. Used from one event loop."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[Sequence[Change]]] = set()

    @contextmanager
    def queue(self) -> Iterator[asyncio.Queue[Sequence[Change]]]:
        """A queue of one watcher, which gets every batch that is sent meanwhile."""
        queue: asyncio.Queue[Sequence[Change]] = asyncio.Queue()
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def send(self, changes: Sequence[Change]) -> None:
        """Give every watcher a batch of changes."""
        for queue in self._queues:
            queue.put_nowait(changes)


_PURPOSE = "registry value"


def seal(key: bytes, value: bytes) -> bytes:
    """``value`` with the proof that a process of this run wrote it under ``key``."""
    return proof_of_run(_PURPOSE, key, value).hex().encode() + b" " + value


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """The value that ``seal`` was given; None when no process of this run wrote it there."""
    mac, _, value = sealed.partition(b" ")
    return value if compare_digest(mac, proof_of_run(_PURPOSE, key, value).hex().encode()) else None

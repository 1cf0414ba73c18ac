"""The changes between two views of the registry. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commutator.contract.registry import LAPSED, Change, WorkerDown, WorkerUp
from commutator.contract.worker import WorkerRecord

__all__ = ["description", "difference", "succession"]


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

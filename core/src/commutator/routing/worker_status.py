"""What people are told of a worker, as one front door sees it."""

from __future__ import annotations

from attrs import frozen

from commutator.routing.contract import candidate_id
from commutator.routing.load import InFlightLoad
from commutator.routing.view import LiveWorker
from commutator.types import Role

__all__ = ["WorkerStatus", "worker_status"]

_LOOPBACK = {"127.0.0.1", "localhost", "[::1]"}


@frozen
class WorkerStatus:
    """One line of ``/health``."""

    worker_id: str
    model: str
    kind: str
    state: str
    """ "ready", "draining" or "unreachable"."""
    active_requests: int
    """From this front door."""
    active_requests_of_all: int
    """From every front door that tells this one of its load."""
    admin_address: str | None = None
    """Where `commutator kv` asks it; None when that is not on this machine, or nowhere."""
    role: Role = Role.BOTH
    hands_over: bool = False
    """Whether its prefill and decode can be apart, so that it can have another role."""


def worker_status(worker: LiveWorker, load: InFlightLoad) -> WorkerStatus:
    """All ranks of the worker together."""
    record = worker.record
    ranks = [candidate_id(record, rank) for rank in range(record.info.data_parallel_size)]
    return WorkerStatus(
        record.worker_id,
        record.model,
        record.kind,
        _state(worker),
        sum(load.own(rank).active_requests for rank in ranks),
        sum(load.of(rank).active_requests for rank in ranks),
        _local(worker.client.admin_address),
        record.role,
        record.info.handover is not None,
    )


def _local(address: str | None) -> str | None:
    """The address, if it is this machine's own: others are nobody's business."""
    host = (address or "").rpartition(":")[0]
    return address if host in _LOOPBACK else None


def _state(worker: LiveWorker) -> str:
    if worker.record.draining:
        return "draining"
    return "ready" if worker.connected else "unreachable"

"""The registry's state as a pure function: who is registered, until when, and what changed.

Every step first lets due leases lapse, so that a late sign of life cannot revive a worker that
others were already entitled to consider gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, field, frozen

from commutator.types import Role, WorkerRecord

__all__ = [
    "LAPSED",
    "Change",
    "Deregister",
    "Down",
    "Event",
    "KeepAlive",
    "Lease",
    "LeaseTable",
    "Register",
    "SetDraining",
    "SetRole",
    "Tick",
    "Up",
    "step",
]

LAPSED = "lease expired"


@frozen
class Up:
    """A worker can be reached, or its record changed."""

    record: WorkerRecord


@frozen
class Down:
    """A worker is gone. ``reason``: "lease expired", "stopped", "draining" or "failed"."""

    worker_id: str
    reason: str


Change = Up | Down


@frozen
class Register:
    """Begin a lease. A live lease of the same worker id ends: that process was replaced."""

    record: WorkerRecord
    ttl_s: float


@frozen
class KeepAlive:
    lease_id: int


@frozen
class Deregister:
    lease_id: int
    reason: str


@frozen
class SetDraining:
    """A worker shall get nothing new, or may again. Holds for its later leases, too."""

    worker_id: str
    draining: bool


@frozen
class SetRole:
    """A worker shall be sent another phase of requests. Holds for its later leases, too."""

    worker_id: str
    role: Role


@frozen
class Tick:
    """Nothing but time passed."""


Event = Register | KeepAlive | Deregister | SetDraining | SetRole | Tick


@frozen
class Lease:
    lease_id: int
    record: WorkerRecord
    ttl_s: float
    expires_at: float


@frozen
class LeaseTable:
    """All live leases, by lease id. Times are seconds of one monotonic clock."""

    leases: Mapping[int, Lease] = field(factory=dict)
    last_id: int = 0
    draining: frozenset[str] = frozenset()
    """Ids of workers that shall get nothing new, for as long as nobody says otherwise."""
    roles: Mapping[str, Role] = field(factory=dict)
    """Of workers whose role is not what they register with."""

    def records(self) -> list[WorkerRecord]:
        return [lease.record for lease in self.leases.values()]

    def next_expiry(self) -> float | None:
        """When the first lease lapses unless it is kept alive."""
        return min((lease.expires_at for lease in self.leases.values()), default=None)


def step(table: LeaseTable, event: Event, now: float) -> tuple[LeaseTable, list[Change], bool]:
    """The new table, what watchers must hear in this order, and whether the lease was found."""
    due = [lease for lease in table.leases.values() if lease.expires_at <= now]
    changes: list[Change] = [Down(lease.record.worker_id, LAPSED) for lease in due]
    leases = {i: lease for i, lease in table.leases.items() if lease.expires_at > now}
    last_id, draining, roles, found = table.last_id, table.draining, table.roles, True
    match event:
        case Register(record, ttl_s):
            role = roles.get(record.worker_id, record.role)
            record = evolve(record, draining=record.worker_id in draining, role=role)
            same = [i for i, lease in leases.items() if lease.record.worker_id == record.worker_id]
            changes += [Down(leases.pop(i).record.worker_id, "failed") for i in same]
            last_id += 1
            leases[last_id] = Lease(last_id, record, ttl_s, now + ttl_s)
            changes.append(Up(record))
        case KeepAlive(lease_id) if lease_id in leases:
            lease = leases[lease_id]
            leases[lease_id] = evolve(lease, expires_at=now + lease.ttl_s)
        case Deregister(lease_id, reason) if lease_id in leases:
            changes.append(Down(leases.pop(lease_id).record.worker_id, reason))
        case SetDraining(worker_id, wanted):
            if found := _rewrite(leases, changes, worker_id, draining=wanted):
                draining = draining | {worker_id} if wanted else draining - {worker_id}
        case SetRole(worker_id, role):
            if found := _rewrite(leases, changes, worker_id, role=role):
                roles = {**roles, worker_id: role}
        case Tick():
            pass
        case _:
            found = False
    return LeaseTable(leases, last_id, draining, roles), changes, found


def _rewrite(
    leases: dict[int, Lease], changes: list[Change], worker_id: str, **fields: Any
) -> bool:
    """Change the worker's record, and tell of it if it is another then. False: it has none."""
    held = [lease for lease in leases.values() if lease.record.worker_id == worker_id]
    for lease in held:
        record = evolve(lease.record, **fields)
        if record != lease.record:
            leases[lease.lease_id] = evolve(lease, record=record)
            changes.append(Up(record))
    return bool(held)

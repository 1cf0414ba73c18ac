"""The registry `memory`: a pure state machine of leases, driven by a clock."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from attrs import Attribute, evolve, field, frozen

from commutator.contract.registry import (
    CLAIM_TTLS,
    LAPSED,
    RETIRED,
    Change,
    Document,
    Registry,
    RegistryConfig,
    WorkerDown,
    WorkerUp,
    check_document,
)
from commutator.contract.settings import setting
from commutator.contract.worker import Role, WorkerRecord
from commutator.errors import NameTakenError
from commutator.registry.changes import Watchers, description, succession
from commutator.registry.documents import (
    Desired,
    Documents,
    load_desired,
    load_documents,
    save_desired,
    save_documents,
)

_BEAT_S = 1.0
"""The longest time from one look at the leases to the next."""
_LEASE_ID_BITS = 52
"""Of the number at which a registry's lease ids begin."""


def _is_an_address(_: object, _field: Attribute[Any], value: str | None) -> None:
    if value is None:
        return
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:  # noqa: PLR2004
        raise ValueError(f"address: expected HOST:PORT, got {value!r}")


@frozen(kw_only=True)
class MemoryConfig(RegistryConfig):
    """Workers in the memory of one supervisor."""

    address: str | None = setting(
        "For two or three hosts: where the one whose `cluster.host.advertise` is HOST serves the "
        "registry to the others, HOST:PORT. By default each deployment has its own.",
        None,
        validator=_is_an_address,
    )
    state_file: str | None = setting(
        "JSON file that keeps which workers are drained, and their changed roles, while the "
        "registry's supervisor is stopped; FILE.documents beside it keeps documents. None: they "
        "are forgotten.",
        None,
    )


@frozen
class Deregister:
    lease_id: int
    reason: str


@frozen
class KeepAlive:
    lease_id: int


@frozen
class Register:
    """Begin a lease, in place of a live one of the same worker id and instance, if any.

    Does nothing while another instance has a live lease of the worker id.
    """

    record: WorkerRecord
    ttl_s: float


@frozen
class SetDraining:
    """Drain a worker or undrain it; also applies to its later leases."""

    worker_id: str
    draining: bool


@frozen
class SetRole:
    """Change a worker's role; also applies to its later leases."""

    worker_id: str
    role: Role


@frozen
class Tick:
    """Time passed."""


Event = Register | KeepAlive | Deregister | SetDraining | SetRole | Tick


class MemoryRegistry(Registry):
    """A lease table with a clock."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, state_file: Path | None = None
    ) -> None:
        """``state_file`` keeps what operators want of workers. Raises RegistryError."""
        self._clock = clock
        self._state_file = state_file
        desired = Desired() if state_file is None else load_desired(state_file)
        # Workers outlive a registry: what they hold of an earlier one is no lease of another here.
        self._table = LeaseTable(last_id=secrets.randbits(_LEASE_ID_BITS), desired=desired)
        self._watchers = Watchers()
        self._documents_file: Path | None = None
        self._documents = Documents()
        if state_file is not None:
            self._documents_file = state_file.with_name(f"{state_file.name}.documents")
            self._documents = load_documents(self._documents_file)
        self._readers: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        """Those that watch a document, by its name: set when it has changed."""
        self._timer: asyncio.TimerHandle | None = None

    async def register(self, record: WorkerRecord, ttl_s: float) -> int:
        try:
            async with asyncio.timeout(CLAIM_TTLS * ttl_s), aclosing(self.watch()) as batches:
                while not self._step(Register(record, ttl_s)):
                    await anext(batches)
        except TimeoutError:
            held = (one for one in self._table.records() if one.worker_id == record.worker_id)
            raise NameTakenError(record.worker_id, description(next(held, record))) from None
        return self._table.last_id

    async def keep_alive(self, lease_id: int) -> bool:
        return self._step(KeepAlive(lease_id))

    async def deregister(self, lease_id: int, reason: str) -> None:
        self._step(Deregister(lease_id, reason))

    async def set_draining(self, worker_id: str, draining: bool) -> bool:
        return self._step(SetDraining(worker_id, draining))

    async def set_role(self, worker_id: str, role: Role) -> bool:
        return self._step(SetRole(worker_id, role))

    async def read_document(self, name: str) -> Document | None:
        check_document(name)
        return self._documents.by_name.get(name)

    async def write_document(self, name: str, value: bytes, *, expected: int) -> int | None:
        check_document(name, value)
        changed = self._documents.written(name, value, expected)
        if changed is None:
            return None
        self._keep(name, changed)
        return changed.version(name)

    async def delete_document(self, name: str, *, expected: int) -> bool:
        check_document(name)
        changed = self._documents.deleted(name, expected)
        if changed is not None:
            self._keep(name, changed)
        return changed is not None

    async def watch_document(self, name: str) -> AsyncGenerator[Document | None, None]:
        check_document(name)
        changed = asyncio.Event()
        self._readers[name].add(changed)
        try:
            while True:
                changed.clear()
                yield self._documents.by_name.get(name)
                await changed.wait()
        finally:
            self._readers[name].discard(changed)
            if not self._readers[name]:
                del self._readers[name]

    def _keep(self, name: str, documents: Documents) -> None:
        if self._documents_file is not None:
            save_documents(self._documents_file, documents)  # first: what fails has not happened
        self._documents = documents
        for reader in self._readers.get(name, ()):
            reader.set()

    def view_age_s(self) -> float | None:
        return 0.0

    async def watch(self) -> AsyncGenerator[Sequence[Change], None]:
        self._step(Tick())
        with self._watchers.queue() as queue:
            queue.put_nowait([WorkerUp(record=record) for record in self._table.records()])
            while True:
                yield await queue.get()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _step(self, event: Event) -> bool:
        loop, now = asyncio.get_running_loop(), self._clock()
        if self._timer is not None and loop.time() > self._timer.when() + _BEAT_S:
            # This process was paused, and what renews the leases is still to be read.
            self._table = self._table.extended(now)
        table, changes, found = step(self._table, event, now)
        if self._state_file is not None and table.desired != self._table.desired:
            save_desired(self._state_file, table.desired)  # first: what fails has not happened
        self._table = table
        if changes:
            self._watchers.send(changes)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (expiry := self._table.next_expiry()) is not None:
            wait_s = min(max(0.0, expiry - now), _BEAT_S)
            self._timer = loop.call_later(wait_s, self._step, Tick())
        return found


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
    desired: Desired = field(factory=Desired)

    def records(self) -> list[WorkerRecord]:
        return [lease.record for lease in self.leases.values()]

    def next_expiry(self) -> float | None:
        """When the first lease lapses, in the clock's seconds; None without leases."""
        return min((lease.expires_at for lease in self.leases.values()), default=None)

    def extended(self, now: float) -> LeaseTable:
        """Each lease as if it had just been renewed."""
        leases = {i: evolve(one, expires_at=now + one.ttl_s) for i, one in self.leases.items()}
        return evolve(self, leases=leases)


def step(table: LeaseTable, event: Event, now: float) -> tuple[LeaseTable, list[Change], bool]:
    """The new table, the changes for watchers in order, and whether the event was carried out.

    It is not where the lease or the worker does not exist, or another instance has the worker id.
    """
    due = [lease for lease in table.leases.values() if lease.expires_at <= now]
    changes: list[Change] = [
        WorkerDown(worker_id=lease.record.worker_id, reason=LAPSED) for lease in due
    ]
    leases = {i: lease for i, lease in table.leases.items() if lease.expires_at > now}
    last_id, found = table.last_id, True
    draining, roles = table.desired.draining, table.desired.roles
    match event:
        case Register(record, ttl_s):
            role = roles.get(record.worker_id, record.role)
            record = evolve(record, draining=record.worker_id in draining, role=role)
            begun = Lease(last_id + 1, record, ttl_s, now + ttl_s)
            if found := _begin(leases, changes, begun):
                last_id = begun.lease_id
        case KeepAlive(lease_id) if lease_id in leases:
            lease = leases[lease_id]
            leases[lease_id] = evolve(lease, expires_at=now + lease.ttl_s)
        case Deregister(lease_id, reason) if lease_id in leases:
            worker_id = leases.pop(lease_id).record.worker_id
            changes.append(WorkerDown(worker_id=worker_id, reason=reason))
            retired = {worker_id} if reason == RETIRED else set()
            draining -= retired
            roles = {name: roles[name] for name in roles.keys() - retired}
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
    return LeaseTable(leases, last_id, Desired(draining, roles)), changes, found


def _begin(leases: dict[int, Lease], changes: list[Change], begun: Lease) -> bool:
    """Add a lease, in place of its instance's former one. False: another instance has the name."""
    held = [lease for lease in leases.values() if lease.record.worker_id == begun.record.worker_id]
    if any(lease.record.instance != begun.record.instance for lease in held):
        return False
    for lease in held:
        del leases[lease.lease_id]
    changes += succession(held[0].record if held else None, begun.record)
    leases[begun.lease_id] = begun
    return True


def _rewrite(
    leases: dict[int, Lease], changes: list[Change], worker_id: str, **fields: Any
) -> bool:
    """Change the record of a worker, and add the change. False: the worker has no lease."""
    held = [lease for lease in leases.values() if lease.record.worker_id == worker_id]
    for lease in held:
        record = evolve(lease.record, **fields)
        if record != lease.record:
            leases[lease.lease_id] = evolve(lease, record=record)
            changes.append(WorkerUp(record=record))
    return bool(held)

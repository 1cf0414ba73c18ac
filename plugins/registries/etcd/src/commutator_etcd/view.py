"""The keys of a cluster in etcd, their values, and the workers that they add up to. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from math import inf
from typing import TypeVar

import msgspec
from attrs import evolve, frozen

from commutator import WorkerRecord
from commutator.contract.registry import LAPSED, Change, WorkerDown
from commutator.contract.worker import Role
from commutator.registry import seal, succession, unseal
from commutator_etcd.follower import Delta

log = logging.getLogger(__name__)

T = TypeVar("T")

_GRACE_S = 1.0


@frozen(kw_only=True)
class Desired:
    """What operators want of a worker; it outlives the worker's lease."""

    draining: bool = False
    role: Role | None = None
    """None: as the worker registers."""

    def applied_to(self, record: WorkerRecord) -> WorkerRecord:
        """The record as watchers get it."""
        role = record.role if self.role is None else self.role
        return evolve(record, draining=self.draining, role=role)


@frozen(kw_only=True)
class Gone:
    """Why an instance of a worker left; deleted together with its record, or soon after."""

    reason: str
    instance: str


@frozen
class Keys:
    """The keys of one cluster."""

    cluster: str

    @property
    def prefix(self) -> bytes:
        """What all of them begin with."""
        return f"/commutator/{self.cluster}/v1/".encode()

    def worker(self, worker_id: str) -> bytes:
        """Holds the worker's record while its lease lives."""
        return self.prefix + b"workers/" + worker_id.encode()

    def desired(self, worker_id: str) -> bytes:
        """Holds ``Desired``, without a lease."""
        return self.prefix + b"desired/" + worker_id.encode()

    def gone(self, worker_id: str) -> bytes:
        """Holds ``Gone`` for some seconds."""
        return self.prefix + b"gone/" + worker_id.encode()

    def document(self, name: str) -> bytes:
        """Holds a document, apart from what every process follows."""
        return f"/commutator/{self.cluster}/documents/{name}".encode()

    def parts(self, key: bytes) -> tuple[bytes, str]:
        """("workers", worker id), or the like; ("", "") for a key that is not one of these."""
        kind, _, name = key.removeprefix(self.prefix).partition(b"/")
        return (kind, name.decode(errors="replace")) if name else (b"", "")


def encoded(key: bytes, value: object) -> bytes:
    """The bytes to store under ``key``: JSON, sealed with the run's secret."""
    return seal(key, msgspec.json.encode(value))


def decoded(key: bytes, stored: bytes, cls: type[T]) -> T | None:
    """The value; None when no process of this run wrote it."""
    body = unseal(key, stored)
    if body is None:
        return None
    try:
        return msgspec.json.decode(body, type=cls)
    except msgspec.DecodeError as error:  # another version's, with the same secret
        log.error("%s in etcd is ignored: %s", key.decode(errors="replace"), error)  # noqa: TRY400
        return None


class ClusterView:
    """Turns changes of keys into changes of workers. Times are seconds of one monotonic clock.

    A worker whose key went without a reason is removed only if it is still away after ``_GRACE_S``:
    when a leader that was stopped for a while wakes up, it may end all leases that were renewed
    meanwhile (etcd#15247 says in which versions); their holders put the keys back well within that
    time.
    """

    def __init__(self, keys: Keys) -> None:
        self.records: dict[str, WorkerRecord] = {}
        """The live workers, as watchers know them."""
        self._keys = keys
        self._registered: dict[str, WorkerRecord] = {}
        self._desired: dict[str, Desired] = {}
        self._gone: dict[str, Gone] = {}
        self._missing: dict[str, float] = {}
        """Until when the keys of workers may come back, by worker id."""

    def missing(self) -> Iterable[str]:
        """The workers whose keys went without a reason, and may come back."""
        return self._missing.keys()

    def due_s(self) -> float:
        """As of when ``overdue`` has something to tell; infinite: never."""
        return min(self._missing.values(), default=inf)

    def overdue(self, confirmed_s: float) -> list[Change]:
        """The workers that did not come back. The keys were complete as of ``confirmed_s``."""
        gone = [name for name, until_s in self._missing.items() if until_s <= confirmed_s]
        for worker_id in gone:
            del self._missing[worker_id], self.records[worker_id]
        return [WorkerDown(worker_id=worker_id, reason=LAPSED) for worker_id in gone]

    def apply(self, delta: Delta, now_s: float) -> list[Change]:
        """Take the new values of keys; returns the changes of workers, departures first."""
        touched: dict[str, None] = {}
        for key, stored in delta.items():
            match self._keys.parts(key):
                case b"workers", worker_id:
                    _put(self._registered, worker_id, self._read(key, stored, WorkerRecord))
                    touched[worker_id] = None
                case b"desired", worker_id:
                    _put(self._desired, worker_id, self._read(key, stored, Desired))
                    touched[worker_id] = None
                case b"gone", worker_id:
                    _put(self._gone, worker_id, self._read(key, stored, Gone))
        return self._changes(touched, now_s)

    def _read(self, key: bytes, stored: bytes | None, cls: type[T]) -> T | None:
        if stored is None:
            return None
        value = decoded(key, stored, cls)
        if value is None:
            log.warning(
                "etcd: %s is ignored: no process with this deployment's runtime.secret wrote it; "
                "deployments of one cluster need the same secret",
                key.decode(errors="replace"),
            )
        return value

    def _changes(self, worker_ids: Iterable[str], now_s: float) -> list[Change]:
        down: list[Change] = []
        up: list[Change] = []
        for worker_id in worker_ids:
            known = self.records.get(worker_id)
            registered = self._registered.get(worker_id)
            if registered is not None:
                record = self._desired.get(worker_id, Desired()).applied_to(registered)
                self.records[worker_id] = record
                changes = succession(known, record)
                if self._missing.pop(worker_id, None) is not None:
                    changes = [_lapsed(change) for change in changes]
                up += changes
            elif known is not None:
                reason = self._reason(known)
                if reason is None:
                    self._missing.setdefault(worker_id, now_s + _GRACE_S)
                else:
                    self._missing.pop(worker_id, None)
                    del self.records[worker_id]
                    down.append(WorkerDown(worker_id=worker_id, reason=reason))
        return down + up

    def _reason(self, known: WorkerRecord) -> str | None:
        gone = self._gone.get(known.worker_id)
        return gone.reason if gone is not None and gone.instance == known.instance else None


def _lapsed(change: Change) -> Change:
    return evolve(change, reason=LAPSED) if isinstance(change, WorkerDown) else change


def _put(mapping: dict[str, T], name: str, value: T | None) -> None:
    if value is None:
        mapping.pop(name, None)
    else:
        mapping[name] = value

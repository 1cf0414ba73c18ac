"""The objects of a cluster in the API server, and the workers that they add up to. Pure."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import TypeVar

import msgspec
from attrs import evolve, frozen

from commutator import WorkerRecord
from commutator.contract.registry import LAPSED, Change, WorkerDown, WorkerUp
from commutator.contract.worker import Role
from commutator.registry import seal, succession, unseal
from commutator_kubernetes.client import Json, Resource, resource
from commutator_kubernetes.reflector import Delta

log = logging.getLogger(__name__)

T = TypeVar("T")

GROUP, VERSION = "commutator.dev", "v1alpha1"
CLUSTER_LABEL = f"{GROUP}/cluster"
_LONGEST_NAME = 63
_DIGEST = 10
_FORGET_S = 60.0
"""After this time the objects of a holder that lapsed may be deleted."""


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
class Entry:
    """What the object of a worker says."""

    record: WorkerRecord
    lease: str
    """Another one for each registration."""
    holder: str
    """The name of the object of the process that registered it."""
    gone: str | None = None
    """Why it left; the object is deleted at once after that."""


@frozen(kw_only=True)
class Wish:
    """What the object of a wish says."""

    worker_id: str
    desired: Desired


def object_name(text: str) -> str:
    """A name that an object can have, of its own for each text."""
    plain = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-") or "x"
    if plain == text and len(text) <= _LONGEST_NAME:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]
    return f"{plain[: _LONGEST_NAME - _DIGEST - 1].rstrip('-')}-{digest}"


@frozen(kw_only=True)
class Beat:
    """What the object of a process says, that has registered workers."""

    duration_s: float
    """How long its workers live after this."""
    number: int
    """Another one each time."""


@frozen
class Places:
    """Where the objects of one cluster are."""

    cluster: str
    namespace: str

    @property
    def labels(self) -> dict[str, str]:
        """Of all of its objects."""
        return {CLUSTER_LABEL: self.cluster}

    @property
    def members(self) -> Resource:
        """Workers, wishes and processes: of one kind, so that one watch tells of all of them."""
        return self._of("commutatormembers")

    @property
    def documents(self) -> Resource:
        """A document each."""
        return self._of("commutatordocuments")

    def name(self, kind: str, text: str) -> str:
        """The name of an object: of a "worker" or a "wish", by the worker's id, and so on."""
        return f"{kind}.{object_name(f'{self.cluster}-{text}')}"

    def encoded(self, name: str, value: object) -> str:
        """The value to store in an object: JSON, sealed with the run's secret, for this name."""
        return seal(self._key(name), msgspec.json.encode(value)).decode()

    def decoded(self, item: Json, cls: type[T]) -> T | None:
        """What an object holds; None when no process of this run wrote it."""
        name, spec = str(item["metadata"]["name"]), item.get("spec")
        sealed = spec.get("sealed") if isinstance(spec, dict) else None
        body = unseal(self._key(name), str(sealed or "").encode())
        if body is None:
            return None
        try:
            return msgspec.json.decode(body, type=cls)
        except msgspec.DecodeError as error:  # another version's, with the same secret
            log.error("%s in Kubernetes is ignored: %s", name, error)  # noqa: TRY400
            return None

    def _key(self, name: str) -> bytes:
        return f"{self.cluster}/{name}".encode()

    def _of(self, plural: str) -> Resource:
        selector = f"{CLUSTER_LABEL}={self.cluster}"
        return resource(GROUP, VERSION, plural, self.namespace, selector)


@frozen
class _Holder:
    """A process that has registered workers, as this one sees it."""

    heard_s: float
    """When its object was last seen to change, by this process's own clock."""
    beat: Beat

    @property
    def deadline_s(self) -> float:
        return self.heard_s + self.beat.duration_s


class ClusterView:
    """Turns changes of objects into changes of workers. Times are seconds of one monotonic clock.

    A process lapses when its object has not changed for as long as it says, by this one's clock and
    as far as this one could see: what nobody could write or read is held against nobody.
    """

    def __init__(self, places: Places, longest_s: float) -> None:
        """``longest_s``: how long a process lives whose object was not seen yet."""
        self.records: dict[str, WorkerRecord] = {}
        """The live workers, as watchers know them."""
        self._places = places
        self._unseen = Beat(duration_s=longest_s, number=-1)
        self._entries: dict[str, Entry] = {}
        """By the name of the object."""
        self._shown: dict[str, str] = {}
        """The ids of the live workers, by the names of their objects."""
        self._used: Counter[str] = Counter()
        """How many workers each holder has."""
        self._desired: dict[str, Desired] = {}
        """By worker id."""
        self._holders: dict[str, _Holder] = {}
        self._lapsed: dict[str, float] = {}
        """The holders that lapsed, and when that was found."""

    def due_s(self) -> float:
        """As of when ``overdue`` may have something to tell; infinite: never."""
        live = (self._holders[name] for name in self._used if name not in self._lapsed)
        return min((holder.deadline_s for holder in live), default=inf)

    def overdue(self, confirmed_s: float, now_s: float) -> list[Change]:
        """The workers whose holders lapsed. All objects were known as of ``confirmed_s``."""
        lapsed = {
            name
            for name, holder in self._holders.items()
            if name not in self._lapsed and holder.deadline_s <= confirmed_s
        }
        if not lapsed:
            return []
        self._lapsed |= dict.fromkeys(lapsed, now_s)
        return self._changes(
            name for name, entry in self._entries.items() if entry.holder in lapsed
        )

    def recovered(self, now_s: float) -> None:
        """Objects can be seen again: others may not have been able to write them either."""
        for name, holder in self._holders.items():
            if name not in self._lapsed:
                self._holders[name] = evolve(holder, heard_s=now_s)

    def has_lapsed(self, holder: str) -> bool:
        """Whether a holder is known to have lapsed."""
        return holder in self._lapsed

    def forgettable(self, now_s: float) -> list[tuple[str, list[str]]]:
        """The holders that lapsed long ago, each with the objects of its workers."""
        old = [name for name, since_s in self._lapsed.items() if now_s - since_s > _FORGET_S]
        return [
            (name, [one for one, entry in self._entries.items() if entry.holder == name])
            for name in old
        ]

    def apply(self, delta: Delta, now_s: float) -> list[Change]:
        """Take the new states of objects; returns the changes of workers, departures first."""
        touched: dict[str, None] = {}
        for name, item in delta.items():
            match name.partition("."):
                case "worker", _, _:
                    self._take_worker(name, None if item is None else self._entry(item), now_s)
                    touched[name] = None
                case "wish", _, rest:
                    wish = None if item is None else self._read(item, Wish)
                    _put(self._desired, rest, None if wish is None else wish.desired)
                    touched[f"worker.{rest}"] = None
                case "process", _, _:
                    beat = None if item is None else self._read(item, Beat)
                    back = self._take_beat(name, beat, now_s)
                    touched |= dict.fromkeys(back)
        return self._changes(touched)

    def _take_worker(self, name: str, entry: Entry | None, now_s: float) -> None:
        if (known := self._entries.get(name)) is not None:
            self._used[known.holder] -= 1
            if not self._used[known.holder]:
                del self._used[known.holder]
        _put(self._entries, name, entry)
        if entry is not None:
            self._used[entry.holder] += 1
            self._holders.setdefault(entry.holder, _Holder(now_s, self._unseen))

    def _take_beat(self, name: str, beat: Beat | None, now_s: float) -> Iterable[str]:
        """Returns the objects of workers that live again."""
        known = self._holders.get(name)
        if beat is None:  # nobody renews it any more, or its process makes it anew
            if name not in self._used:
                self._holders.pop(name, None)
                self._lapsed.pop(name, None)
            return []
        if known is not None and known.beat == beat:
            return []
        self._holders[name] = _Holder(now_s, beat)
        if self._lapsed.pop(name, None) is None:
            return []
        return [one for one, entry in self._entries.items() if entry.holder == name]

    def _entry(self, item: Json) -> Entry | None:
        entry = self._read(item, Entry)
        if (
            entry is None
            or self._places.name("worker", entry.record.worker_id) != item["metadata"]["name"]
        ):
            return None
        return entry

    def _read(self, item: Json, cls: type[T]) -> T | None:
        value = self._places.decoded(item, cls)
        if value is None:
            log.warning(
                "Kubernetes: %s is ignored: no process with this deployment's runtime.secret wrote "
                "it; deployments of one cluster need the same secret",
                item["metadata"]["name"],
            )
        return value

    def _changes(self, names: Iterable[str]) -> list[Change]:
        """What is new of the workers whose objects have these names."""
        down: list[Change] = []
        up: list[Change] = []
        for name in names:
            entry = self._entries.get(name)
            lives = entry is not None and entry.gone is None and entry.holder not in self._lapsed
            if entry is not None and lives:
                desired = self._desired.get(name.removeprefix("worker."), Desired())
                record = desired.applied_to(entry.record)
                up += succession(self.records.get(record.worker_id), record)
                self.records[record.worker_id] = record
                self._shown[name] = record.worker_id
            elif (worker_id := self._shown.pop(name, None)) is not None:
                reason = LAPSED if entry is None or entry.gone is None else entry.gone
                del self.records[worker_id]
                down.append(WorkerDown(worker_id=worker_id, reason=reason))
        return down + up


def present(view: ClusterView) -> list[Change]:
    """Every live worker, for a watcher that begins."""
    return [WorkerUp(record=record) for record in view.records.values()]


def _put(mapping: dict[str, T], name: str, value: T | None) -> None:
    if value is None:
        mapping.pop(name, None)
    else:
        mapping[name] = value

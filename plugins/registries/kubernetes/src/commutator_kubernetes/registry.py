"""The registry: an object for each worker, and one for each process that has some."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from math import ceil, inf
from typing import Any

from attrs import evolve, frozen

from commutator import WorkerRecord
from commutator.contract.registry import CLAIM_TTLS, LAPSED, RETIRED, Change
from commutator.contract.worker import Role
from commutator.errors import NameTakenError, RegistryError
from commutator.registry import Watchers, description
from commutator_kubernetes.access import find_access
from commutator_kubernetes.client import ApiClient, ApiError, Json
from commutator_kubernetes.config import KubernetesRegistryConfig
from commutator_kubernetes.documents import KubernetesDocuments
from commutator_kubernetes.reflector import Reflector, Relist, version_of
from commutator_kubernetes.view import (
    GROUP,
    VERSION,
    Beat,
    ClusterView,
    Desired,
    Entry,
    Places,
    Wish,
    present,
)

log = logging.getLogger(__name__)

_CONFLICTS = 8
_CLAIM_POLL_S = 0.5
_LIST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 3.0
"""Between lists that fail: what was missed is to be known within seconds of the server's return."""
_RENEWALS = 3
"""In the time that a Lease lasts."""
_RESYNC_JITTER = 0.1
_FAREWELL_PAUSE_S = 1.0
_TIDY_S = 60.0
_LOOK_S = 1.0
"""Longest wait before the deadlines of a session are looked at again."""
_POD_NAME, _POD_UID = "POD_NAME", "POD_UID"
"""Environment variables by which a pod's template says whose objects are deleted with the pod."""


@frozen
class _Held:
    """A worker of this process. Times are of this process's clock."""

    record: WorkerRecord
    lease: str
    ttl_s: float
    began_s: float
    kept_s: float
    """When ``keep_alive`` was called last."""
    looked_s: float
    """When its object was last known to be its own."""


class KubernetesRegistry(KubernetesDocuments):
    """Workers as objects in a namespace.

    A worker lives while its object is there and the process that registered it renews its own, one
    for all of its workers. Whether that has lapsed each observer judges by its own clock.
    """

    def __init__(
        self, config: KubernetesRegistryConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Call it in the event loop that uses it. Raises ConfigError."""
        access = find_access(config.kubeconfig)
        if not access.verified:
            log.warning("the API server's certificate is not checked, as the kubeconfig says")
        places = Places(config.cluster, config.namespace or access.namespace)
        super().__init__(ApiClient(access, config.call_timeout_s, clock), places)
        self._clock = clock
        self._lease_s = config.lease_s
        self._duration_s = float(ceil(config.lease_s))
        """How long a renewal lasts: longer than any ``ttl_s``, as not every call renews."""
        self._holder = places.name("process", secrets.token_hex(8))
        self._beats = 0
        self._owners = _owners(os.environ)
        self._renewal: asyncio.Task[None] | None = None
        self._renewed_s = -inf
        """When the last renewal was sent that was answered."""
        self._held: dict[int, _Held] = {}
        """By the id that ``register`` returned."""
        self._leaving: dict[str, tuple[_Held, str]] = {}
        """Workers whose departure was not written yet, by worker id, and why they left."""
        self._more = asyncio.Event()
        self._minding: asyncio.Task[None] | None = None
        self._tidied_s = clock()
        self._view = ClusterView(places, self._duration_s)
        jitter = 1 + random.uniform(-_RESYNC_JITTER, _RESYNC_JITTER)  # noqa: S311
        self._resync_s = config.resync_s * jitter
        self._reflector = Reflector(self._resync_s)
        self._following: asyncio.Task[None] | None = None
        self._listed_s = -inf
        self._published = False
        self._watchers = Watchers()

    # ------------------------------------------------------------- leases

    async def register(self, record: WorkerRecord, ttl_s: float) -> int:
        ttl_s = max(ttl_s, self._lease_s)
        self._duration_s = max(self._duration_s, float(ceil(1.5 * ttl_s)))
        give_up_s = self._clock() + CLAIM_TTLS * ttl_s
        await self._renew(since_s=self._clock())
        name = self._places.name("worker", record.worker_id)
        seen, seen_s = "", self._clock()
        while True:
            stored = await self._client.get(self._places.members, name)
            if stored is not None:
                entry = self._decoded(stored)
                version, duration_s = await self._holder_of(stored)
                if version != seen:
                    seen, seen_s = version, self._clock()
                is_free = self._clock() - seen_s > duration_s
                if not is_free and not self._may_replace(entry, record):
                    if self._clock() >= give_up_s:
                        foreign = "of a deployment with another runtime.secret"
                        where = foreign if entry is None else description(entry.record)
                        raise NameTakenError(record.worker_id, where)
                    await asyncio.sleep(min(_CLAIM_POLL_S, ttl_s / 5))
                    continue
            lease_id = await self._claim(record, stored, ttl_s)
            if lease_id is not None:
                return lease_id

    def _may_replace(self, entry: Entry | None, record: WorkerRecord) -> bool:
        """Whether the name is surely free for ``record``."""
        if entry is None:
            return False
        own = entry.record.instance == record.instance
        return own or entry.gone is not None or self._view.has_lapsed(entry.holder)

    async def _holder_of(self, stored: Json) -> tuple[str, float]:
        """The version of the object of a worker's process, and how long a renewal lasts."""
        holder = str((stored.get("spec") or {}).get("process") or "none")
        process = await self._client.get(self._places.members, holder)
        beat = None if process is None else self._places.decoded(process, Beat)
        if process is None or beat is None:
            return f"{holder} does not renew", self._duration_s
        return version_of(process), beat.duration_s

    async def _claim(self, record: WorkerRecord, stored: Json | None, ttl_s: float) -> int | None:
        """Write the object, unless it has changed: None."""
        now_s = self._clock()
        held = _Held(record, secrets.token_hex(8), ttl_s, now_s, now_s, now_s)
        body = self._worker(held, stored)
        try:
            if stored is None:
                written = await self._client.create(self._places.members, body)
            else:
                written = await self._client.replace(self._places.members, body)
        except ApiError as error:
            if error.is_conflict or (stored is not None and error.is_missing):
                return None
            raise
        self._reflector.wrote(written, self._clock())
        for former in [
            i for i, one in self._held.items() if one.record.worker_id == record.worker_id
        ]:
            del self._held[former]
        self._leaving.pop(record.worker_id, None)
        lease_id = secrets.randbits(62) | 1
        now_s = self._clock()
        self._held[lease_id] = evolve(held, began_s=now_s, kept_s=now_s)
        if self._minding is None:
            self._minding = asyncio.create_task(self._mind())
        self._more.set()
        return lease_id

    async def keep_alive(self, lease_id: int) -> bool:
        held = self._held.get(lease_id)
        if held is None:
            return False
        # Who waits for an answer that does not come has not given up.
        self._held[lease_id] = evolve(held, kept_s=inf)
        try:
            await self._renew(held.began_s)
            if self._clock() - held.looked_s >= self._lease_s:
                await self._look(lease_id)
        finally:
            if (current := self._held.get(lease_id)) is not None:
                self._held[lease_id] = evolve(current, kept_s=self._clock())
                self._more.set()
        return lease_id in self._held

    async def _look(self, lease_id: int) -> None:
        """Give up a worker whose object is gone or another's."""
        if (held := self._held.get(lease_id)) is None:
            return
        looked_s = self._clock()
        name = self._places.name("worker", held.record.worker_id)
        stored = await self._client.get(self._places.members, name)
        entry = None if stored is None else self._decoded(stored)
        if lease_id not in self._held:
            return
        if entry is None or entry.lease != held.lease or entry.gone is not None:
            del self._held[lease_id]
        else:
            self._held[lease_id] = evolve(self._held[lease_id], looked_s=looked_s)

    async def _renew(self, since_s: float) -> None:
        """Renew what all workers of this process live by, unless that was done lately.

        That is, after ``since_s`` at least.
        """
        lately_s = max(since_s, self._clock() - self._duration_s / _RENEWALS)
        if self._renewed_s >= lately_s:
            return
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew_now())
        await asyncio.shield(self._renewal)

    async def _renew_now(self) -> None:
        sent_s = self._clock()
        self._beats += 1
        beat = Beat(duration_s=self._duration_s, number=self._beats)
        host = os.environ.get(_POD_NAME) or os.uname().nodename
        body = self._object("process", self._holder, {"host": host}, beat, None, self._owners)
        written = await self._client.apply(self._places.members, body)
        self._renewed_s = sent_s
        self._reflector.wrote(written, self._clock())

    async def deregister(self, lease_id: int, reason: str) -> None:
        held = self._held.pop(lease_id, None)
        if held is None:
            return
        self._leaving[held.record.worker_id] = (held, reason)
        await self._leave(held, reason)

    async def _leave(self, held: _Held, reason: str) -> None:
        """Write that a worker left, unless its name is another's; raises RegistryError."""
        worker_id = held.record.worker_id
        name, place = self._places.name("worker", worker_id), self._places.members
        if reason == RETIRED:
            await self._client.delete(place, self._places.name("wish", worker_id))
        for _ in range(_CONFLICTS):
            stored = await self._client.get(place, name)
            entry = None if stored is None else self._decoded(stored)
            if stored is None or entry is None or entry.lease != held.lease:
                break
            try:
                # Watchers get the reason with this change, and the object ends with the next.
                body = self._worker(held, stored, gone=reason)
                written = await self._client.replace(place, body)
                await self._client.delete(place, name, uid=written["metadata"]["uid"])
                break
            except ApiError as error:
                if not error.is_conflict:
                    raise
        if self._leaving.get(worker_id) == (held, reason):
            del self._leaving[worker_id]

    async def _mind(self) -> None:
        """End the leases that nobody keeps alive; write what could not be written at first."""
        while True:
            now_s = self._clock()
            for lease_id, held in list(self._held.items()):
                if now_s >= held.kept_s + held.ttl_s:
                    del self._held[lease_id]
                    self._leaving[held.record.worker_id] = (held, LAPSED)
            due_s = [held.kept_s + held.ttl_s for held in self._held.values()]
            for held, reason in list(self._leaving.values()):
                try:
                    await self._leave(held, reason)
                except RegistryError as error:
                    log.debug("%s", error)
                    due_s.append(self._clock() + _FAREWELL_PAUSE_S)
            if self._held and now_s - self._tidied_s > _TIDY_S:
                self._tidied_s = now_s
                await self._tidy()
            self._more.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min([*due_s, inf]) - self._clock())):
                    await self._more.wait()

    async def _tidy(self) -> None:
        """Delete what processes have left that ended long ago, unless it has changed."""
        for holder, names in self._view.forgettable(self._clock()):
            # The process's own object goes once those of its workers have gone.
            for name in names or [holder]:
                stored = self._reflector.objects.get(name)
                if stored is not None:
                    with suppress(RegistryError):
                        place, version = self._places.members, version_of(stored)
                        await self._client.delete(place, name, version=version)

    # ------------------------------------------------------------- wishes

    async def set_draining(self, worker_id: str, draining: bool) -> bool:
        return await self._set_desired(worker_id, draining=draining)

    async def set_role(self, worker_id: str, role: Role) -> bool:
        return await self._set_desired(worker_id, role=role)

    async def _set_desired(self, worker_id: str, **fields: Any) -> bool:
        place, name = self._places.members, self._places.name("wish", worker_id)
        for _ in range(_CONFLICTS):
            worker = await self._client.get(place, self._places.name("worker", worker_id))
            entry = None if worker is None else self._decoded(worker)
            if entry is None or entry.gone is not None or self._view.has_lapsed(entry.holder):
                return False
            stored = await self._client.get(place, name)
            known = None if stored is None else self._places.decoded(stored, Wish)
            wanted = evolve(known.desired if known is not None else Desired(), **fields)
            body = self._wish(worker_id, wanted, stored)
            try:
                if wanted == Desired():
                    version = None if stored is None else version_of(stored)
                    await self._client.delete(place, name, version=version)
                elif stored is None:
                    await self._client.create(place, body)
                else:
                    await self._client.replace(place, body)
            except ApiError as error:
                if not (error.is_conflict or (stored is not None and error.is_missing)):
                    raise
            else:
                return True
        raise RegistryError(f"worker {worker_id}: others are changing it, too; try again")

    # ------------------------------------------------------------- objects

    def _decoded(self, stored: Json) -> Entry | None:
        return self._places.decoded(stored, Entry)

    def _worker(self, held: _Held, stored: Json | None, gone: str | None = None) -> Json:
        record = held.record
        name = self._places.name("worker", record.worker_id)
        entry = Entry(record=record, lease=held.lease, holder=self._holder, gone=gone)
        shown = {
            "worker": record.worker_id,
            "model": record.model,
            "engine": record.engine,
            "role": record.role.value,
            "host": record.host,
            "address": record.address,
            "generation": record.generation,
            "process": self._holder,
        }
        return self._object("worker", name, shown, entry, stored, self._owners)

    def _wish(self, worker_id: str, desired: Desired, stored: Json | None) -> Json:
        name = self._places.name("wish", worker_id)
        shown = {
            "worker": worker_id,
            "draining": desired.draining,
            "role": "" if desired.role is None else desired.role.value,
        }
        wish = Wish(worker_id=worker_id, desired=desired)
        return self._object("wish", name, shown, wish, stored, {})

    def _object(
        self, kind: str, name: str, shown: Json, value: object, stored: Json | None, owners: Json
    ) -> Json:
        """An object that holds a value. What is ``shown`` is for people, and never trusted."""
        metadata = {"name": name, "labels": self._places.labels, **owners}
        if stored is not None:
            metadata["resourceVersion"] = version_of(stored)
        # Old API servers take an empty text for none at all, which their schemas refuse.
        shown = {field: said for field, said in shown.items() if said}
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "CommutatorMember",
            "metadata": metadata,
            "spec": {"type": kind, **shown, "sealed": self._places.encoded(name, value)},
        }

    # ------------------------------------------------------------- watches

    def view_age_s(self) -> float | None:
        return self._reflector.age_s(self._clock())

    async def watch(self) -> AsyncGenerator[Sequence[Change], None]:
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        with self._watchers.queue() as queue:
            if self._published:
                queue.put_nowait(present(self._view))
            while True:
                yield await queue.get()

    async def close(self) -> None:
        tasks = [task for task in (self._following, self._minding, self._renewal) if task]
        self._following = self._minding = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _follow(self) -> None:
        """Session after session, until cancelled. Watchers keep their last view in between."""
        failed, pause_s = False, _LIST_PAUSE_S
        while True:
            listed_s = self._listed_s
            try:
                await self._session(recovers=failed)
            except Relist as end:
                failed = end.fault
                log.log(logging.WARNING if failed else logging.DEBUG, "Kubernetes: %s", end)
            except RegistryError as error:
                again = failed and self._listed_s == listed_s
                log.log(logging.DEBUG if again else logging.WARNING, "Kubernetes: %s", error)
                failed = True
            except Exception:
                log.exception("following Kubernetes failed; listing again")
                failed = True
            has_listed = self._listed_s != listed_s
            pause_s = _LIST_PAUSE_S if has_listed else min(_LONGEST_PAUSE_S, 2 * pause_s)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311

    async def _session(self, *, recovers: bool) -> None:
        """List, then watch from there on. Raises Relist or RegistryError, sooner or later."""
        reflector, place, asked_s = self._reflector, self._places.members, self._clock()
        listing = await self._client.list(place)
        now_s = self._clock()
        if recovers:
            self._view.recovered(now_s)
        delta = reflector.listed(listing.items, listing.version, asked_s, now_s)
        self._publish(self._view.apply(delta, now_s))
        self._listed_s = now_s
        async with self._client.watch(place, listing.version, self._resync_s) as events:
            reading = asyncio.ensure_future(_next(events))
            try:
                while True:
                    now_s = self._clock()
                    self._publish(self._view.overdue(reflector.confirmed_s, now_s))
                    reflector.confirm_by(self._view.due_s())
                    reflector.tick(now_s)
                    timeout_s = min(_LOOK_S, max(0.0, reflector.due_s() - now_s))
                    await asyncio.wait({reading}, timeout=timeout_s)
                    if reading.done():
                        event = reading.result()
                        if event is None:
                            raise Relist("the watch has ended", fault=False)
                        reading = asyncio.ensure_future(_next(events))
                        now_s = self._clock()
                        changes = self._view.apply(reflector.received(event, now_s), now_s)
                        self._publish(changes)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def _publish(self, changes: Sequence[Change]) -> None:
        """The first batch holds every worker, also when there is none."""
        if changes or not self._published:
            self._published = True
            self._watchers.send(changes)


async def _next(events: AsyncIterator[Json]) -> Json | None:
    """The next event; None: the stream has ended."""
    return await anext(events, None)


def _owners(environ: Mapping[str, str]) -> Json:
    """Of the objects of this process: its pod, so that they end with it at the latest."""
    name, uid = environ.get(_POD_NAME), environ.get(_POD_UID)
    if not name or not uid:
        return {}
    return {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}]}

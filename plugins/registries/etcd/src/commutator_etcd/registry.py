"""The registry: leases of workers in etcd, and one watch of them for all watchers."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from math import ceil
from typing import Any

from attrs import evolve, frozen

from commutator import WorkerRecord
from commutator.contract.registry import CLAIM_TTLS, RETIRED, Change, WorkerUp
from commutator.contract.worker import Role
from commutator.errors import NameTakenError, RegistryError
from commutator.registry import Watchers, description
from commutator_etcd.client import EtcdClient, Stored, delete, put, unchanged, with_lease
from commutator_etcd.config import EtcdConfig
from commutator_etcd.documents import EtcdDocuments
from commutator_etcd.follower import Follower, SessionEnd
from commutator_etcd.view import ClusterView, Desired, Gone, Keys, decoded, encoded

log = logging.getLogger(__name__)

_CLAIM_POLL_S = 0.2
_GONE_TTL_S = 10
_RENEW_PAUSE_S = 0.1
_LIST_PAUSE_S = (0.1, 0.5)
"""Between the end of a session and the next list; by chance, so that not all list at once."""
_CONFLICTS = 8
_RESYNC_JITTER = 0.1
_SHORTEST_S = 2
"""Seconds. etcd itself makes shorter leases longer: 1.5 times its election timeout."""
_LEAST_PATIENCE_S = 0.2


def whole_ttl_s(ttl_s: float) -> int:
    """The seconds that etcd is asked for: whole ones, at least 2."""
    return max(_SHORTEST_S, ceil(ttl_s))


@frozen
class LeaseHolder:
    """What the holder of one lease knows. Times are seconds of one monotonic clock.

    etcd counts from when it received the last renewal, which is after that was sent: until
    ``deadline_s`` the lease lives, whatever happened on the way. Later it may live or not; only
    etcd's answer tells.
    """

    ttl_s: float
    """How long a renewal lasts."""
    confirmed_s: float
    """When the last renewal was *sent* that etcd answered."""
    longest_s: float
    """How long to wait for one answer at most."""

    @property
    def deadline_s(self) -> float:
        """Until when the lease certainly lives."""
        return self.confirmed_s + self.ttl_s

    def patience_s(self, now_s: float) -> float | None:
        """How long to wait for the answer to a renewal that is sent now.

        Half of what remains, so that there is time to ask another member. None: nothing remains,
        so that this attempt is the last before the lease is reported as unknown.
        """
        remaining_s = self.deadline_s - now_s
        if remaining_s <= 0:
            return None
        return min(self.longest_s, max(_LEAST_PATIENCE_S, remaining_s / 2))

    def confirmed(self, sent_s: float) -> LeaseHolder:
        """A renewal that was sent then was answered."""
        return evolve(self, confirmed_s=max(self.confirmed_s, sent_s))


@frozen
class _Held:
    """A worker of this process, and the lease that it has in etcd."""

    record: WorkerRecord
    lease: int
    holder: LeaseHolder


class EtcdRegistry(EtcdDocuments):
    """Workers in etcd, under the cluster's keys."""

    def __init__(self, config: EtcdConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Call it in the event loop that uses it. Raises ConfigError."""
        if not config.encrypted and config.insecure:
            log.warning("etcd is reached without TLS, as registry.insecure allows")
        self._clock = clock
        self._call_timeout_s = config.call_timeout_s
        super().__init__(EtcdClient(config), Keys(config.cluster))
        self._held: dict[int, _Held] = {}
        """By the id that ``register`` returned."""
        self._restoring: dict[int, asyncio.Task[None]] = {}
        self._view = ClusterView(self._keys)
        jitter = 1 + random.uniform(-_RESYNC_JITTER, _RESYNC_JITTER)  # noqa: S311
        self._follower = Follower(config.resync_s * jitter)
        self._following: asyncio.Task[None] | None = None
        self._listed = False
        self._watchers = Watchers()

    async def register(self, record: WorkerRecord, ttl_s: float) -> int:
        ttl = whole_ttl_s(ttl_s)
        give_up_s = self._clock() + CLAIM_TTLS * ttl
        key = self._keys.worker(record.worker_id)
        while True:
            stored = await self._client.get(key)
            present = None if stored is None else decoded(key, stored.value, WorkerRecord)
            if stored is None or (present is not None and present.instance == record.instance):
                lease_id = await self._claim(record, stored, ttl)
                if lease_id is not None:
                    return lease_id
            elif self._clock() >= give_up_s:
                foreign = "of a deployment with another runtime.secret"
                raise NameTakenError(
                    record.worker_id, foreign if present is None else description(present)
                )
            else:
                await asyncio.sleep(_CLAIM_POLL_S)

    async def _claim(self, record: WorkerRecord, stored: Stored | None, ttl: int) -> int | None:
        """Put the record with a lease of its own, unless the key has changed: None."""
        key = self._keys.worker(record.worker_id)
        sent_s = self._clock()
        lease_id = await self._client.grant(ttl)
        claimed = await self._client.change(
            [unchanged(key, stored)],
            [
                put(key, encoded(key, record), lease_id),
                delete(self._keys.gone(record.worker_id)),
            ],
        )
        if not claimed:
            await self._let_lapse(lease_id)
            return None
        for former in self._held_by(record.worker_id):
            await self._let_lapse(self._held.pop(former).lease)
        holder = LeaseHolder(ttl, sent_s, self._call_timeout_s)
        self._held[lease_id] = _Held(record, lease_id, holder)
        return lease_id

    def _held_by(self, worker_id: str) -> list[int]:
        return [i for i, held in self._held.items() if held.record.worker_id == worker_id]

    def _restore_missing(self) -> None:
        """Put back the keys of workers of this process whose leases certainly live."""
        now_s = self._clock()
        for worker_id in self._view.missing():
            for lease_id in self._held_by(worker_id):
                alive = self._held[lease_id].holder.deadline_s > now_s
                if alive and lease_id not in self._restoring:
                    restoring = self._restore(lease_id, self._held[lease_id])
                    self._restoring[lease_id] = asyncio.create_task(restoring)

    async def _restore(self, lease_id: int, held: _Held) -> None:
        """Put a key back under a new lease; what fails is left to the next renewal."""
        key, sent_s = self._keys.worker(held.record.worker_id), self._clock()
        try:
            lease = await self._client.grant(int(held.holder.ttl_s))
            value = encoded(key, held.record)
            put_back = await self._client.change([unchanged(key, None)], [put(key, value, lease)])
            if put_back and self._held.get(lease_id) == held:
                holder = held.holder.confirmed(sent_s)
                self._held[lease_id] = evolve(held, lease=lease, holder=holder)
                log.warning(
                    "etcd ended a lease that was renewed; %s is back", held.record.worker_id
                )
            else:
                await self._let_lapse(lease)
        except RegistryError as error:
            log.debug("%s", error)
        finally:
            self._restoring.pop(lease_id, None)

    async def _let_lapse(self, lease_id: int) -> None:
        """End a lease that nothing depends on, now or when it lapses."""
        with suppress(RegistryError):
            await self._client.revoke(lease_id)

    async def keep_alive(self, lease_id: int) -> bool:
        while (held := self._held.get(lease_id)) is not None:
            sent_s = self._clock()
            patience_s = held.holder.patience_s(sent_s)
            try:
                alive = await self._client.renew(held.lease, patience_s or self._call_timeout_s)
            except RegistryError:
                if patience_s is None:
                    raise
                await asyncio.sleep(_RENEW_PAUSE_S)
                continue
            if self._held.get(lease_id) != held:  # renewed or put back meanwhile
                continue
            if alive:
                self._held[lease_id] = evolve(held, holder=held.holder.confirmed(sent_s))
            else:
                del self._held[lease_id]
            return alive
        return False

    async def deregister(self, lease_id: int, reason: str) -> None:
        held = self._held.pop(lease_id, None)
        if held is None:
            return
        worker_id = held.record.worker_id
        key, gone = self._keys.worker(worker_id), self._keys.gone(worker_id)
        farewell = await self._client.grant(_GONE_TTL_S)
        value = encoded(gone, Gone(reason=reason, instance=held.record.instance))
        # In one transaction, so that watchers get the reason with the departure.
        operations = [delete(key), put(gone, value, farewell)]
        if reason == RETIRED:
            operations.append(delete(self._keys.desired(worker_id)))
        await self._client.change([with_lease(key, held.lease)], operations)
        await self._let_lapse(held.lease)

    async def set_draining(self, worker_id: str, draining: bool) -> bool:
        return await self._set_desired(worker_id, draining=draining)

    async def set_role(self, worker_id: str, role: Role) -> bool:
        return await self._set_desired(worker_id, role=role)

    async def _set_desired(self, worker_id: str, **fields: Any) -> bool:
        worker, key = self._keys.worker(worker_id), self._keys.desired(worker_id)
        for _ in range(_CONFLICTS):
            present = await self._client.get(worker)
            if present is None or decoded(worker, present.value, WorkerRecord) is None:
                return False
            stored = await self._client.get(key)
            known = None if stored is None else decoded(key, stored.value, Desired)
            wanted = evolve(known or Desired(), **fields)
            operation = delete(key) if wanted == Desired() else put(key, encoded(key, wanted))
            if await self._client.change([unchanged(key, stored)], [operation]):
                return True
        raise RegistryError(f"worker {worker_id}: others are changing it, too; try again")

    def view_age_s(self) -> float | None:
        return self._follower.age_s(self._clock())

    async def watch(self) -> AsyncGenerator[Sequence[Change], None]:
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        with self._watchers.queue() as queue:
            if self._listed:
                present = self._view.records.values()
                queue.put_nowait([WorkerUp(record=record) for record in present])
            while True:
                yield await queue.get()

    async def close(self) -> None:
        tasks = [*self._restoring.values(), *filter(None, [self._following])]
        self._following = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _follow(self) -> None:
        """Session after session, until cancelled. Watchers keep their last view in between."""
        failed = False
        while True:
            revision = self._follower.revision
            try:
                await self._session()
            except SessionEnd as end:
                if end.fault:
                    self._client.turn_away()
                log.log(logging.WARNING if end.fault else logging.DEBUG, "etcd: %s", end)
            except RegistryError as error:
                again = failed and self._follower.revision == revision
                log.log(logging.DEBUG if again else logging.WARNING, "%s", error)
                failed = True
            except Exception:
                log.exception("following etcd failed; listing again")
            await asyncio.sleep(random.uniform(*_LIST_PAUSE_S))  # noqa: S311

    async def _session(self) -> None:
        """List, then watch from there on. Raises SessionEnd or RegistryError, sooner or later."""
        asked_s = self._clock()
        listing = await self._client.list(self._keys.prefix)
        now_s = self._clock()
        changes = self._view.apply(self._follower.listed(listing, asked_s, now_s), now_s)
        self._publish(changes, first=not self._listed)
        self._listed = True
        async with self._client.watch(self._keys.prefix, listing.revision + 1) as watch:
            reading = asyncio.ensure_future(watch.read())
            try:
                while True:
                    self._restore_missing()
                    self._publish(self._view.overdue(self._follower.confirmed_s), first=False)
                    self._follower.confirm_by(self._view.due_s())
                    if self._follower.tick(self._clock()):
                        await watch.ask_progress()
                    timeout_s = max(0.0, self._follower.due_s() - self._clock())
                    await asyncio.wait({reading}, timeout=timeout_s)
                    if reading.done():
                        message = reading.result()
                        reading = asyncio.ensure_future(watch.read())
                        now_s = self._clock()
                        delta = self._follower.received(message, now_s)
                        self._publish(self._view.apply(delta, now_s), first=False)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def _publish(self, changes: Sequence[Change], *, first: bool) -> None:
        if changes or first:
            self._watchers.send(changes)

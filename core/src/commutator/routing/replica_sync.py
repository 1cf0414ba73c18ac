"""Shares this front door's load in flight with the other front doors, and receives theirs.

The hub forwards the messages; see docs/decisions/0005-shared-load.md. When it fails, each front
door routes by its own load alone, as if it were the only one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from attrs import define, field, frozen

from commutator.contract.routing import WorkerLoad
from commutator.frames import FrameProtocol, kind_of
from commutator.registry.hub import Hub, connections
from commutator.routing.load import InFlightLoad, load_of, values_of

log = logging.getLogger(__name__)

_MAX_UNSENT_BYTES = 64 << 10
"""With more unsent bytes nothing is sent: the peer does not read, and a later message is newer."""

_Count = Annotated[int, msgspec.Meta(ge=0)]

_Loads = dict[str, tuple[_Count, _Count, _Count]]


@frozen
class ShareTimes:
    """Intervals of load sharing, in seconds."""

    interval_s: float = 0.05
    """The shortest time between two messages."""
    period_s: float = 0.25
    """Without changes, the load is sent again after this time."""
    silence_s: float = 1.0
    """A peer without a message for this long is dropped from the sums."""


class ReplicaSync:
    """Shares ``load`` under ``name`` with all front doors of a hub."""

    def __init__(
        self, name: str, load: InFlightLoad, hub: Hub, times: ShareTimes | None = None
    ) -> None:
        self._name = f"{name}-{uuid4().hex[:8]}"  # a restarted front door is a new peer
        self._load = load
        self._hub = hub
        self._times = times or ShareTimes()
        self._peers = ReplicaLoads(self._times.silence_s)
        self._connection: FrameProtocol | None = None
        self._number = 0
        self._sent: Mapping[str, WorkerLoad] | None = None
        self._sent_s = 0.0

    async def run(self) -> None:
        """Run until cancelled. Failures are logged and do not stop the front door."""
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._stay_connected())
                    group.create_task(self._tick())
            except Exception:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    # A task of the group failed while it ended: the group then raises that alone.
                    log.exception("load sharing failed while it was ended")
                    raise asyncio.CancelledError from None
                log.exception("load sharing failed; trying again")
                await asyncio.sleep(self._times.silence_s)
            finally:
                self._peers = ReplicaLoads(self._times.silence_s)
                self._apply()

    async def _stay_connected(self) -> None:
        found = connections(self._hub.connect, self._on_frame, "load sharing")
        async with aclosing(found):
            async for connection, lost in found:
                self._connection, self._sent = connection, None
                try:
                    await lost.wait()
                finally:
                    self._connection = None
                    self._announce_stop(connection)
                log.warning("load sharing: the connection to the hub was lost; reconnecting")

    def _announce_stop(self, connection: FrameProtocol) -> None:
        """Announce the stop, so that peers drop this load without waiting for the silence limit."""
        self._number += 1
        connection.send(["share", self._name, self._number, None])

    async def _tick(self) -> None:
        """Compare the totals at intervals, which costs less than a message for each token."""
        while True:
            now_s = time.monotonic()
            for peer in self._peers.expire(now_s):
                log.info("front door %s is silent: its load is no longer counted", peer)
                self._apply()
            if self._connection is not None:
                self._send(self._connection, now_s)
            await asyncio.sleep(self._times.interval_s)

    def _send(self, connection: FrameProtocol, now_s: float) -> None:
        loads = self._load.all_own()
        due = now_s - self._sent_s >= self._times.period_s
        if (loads == self._sent and not due) or connection.unsent_bytes > _MAX_UNSENT_BYTES:
            return
        self._number += 1
        self._sent, self._sent_s = loads, now_s
        packed = {worker: values_of(load) for worker, load in loads.items()}
        connection.send(["share", self._name, self._number, packed])

    def _on_frame(self, frame: list[Any]) -> None:
        match frame:
            case ["shared", str(peer), int(), None]:
                if self._peers.forget(peer):
                    self._apply()
            case ["shared", str(peer), int(number), packed]:
                try:
                    loads = msgspec.convert(packed, _Loads)
                except msgspec.ValidationError as error:
                    log.warning("front door %s sent a load that cannot be read: %s", peer, error)
                    return
                received = {worker: load_of(*values) for worker, values in loads.items()}
                if self._peers.update(peer, number, received, time.monotonic()):
                    self._apply()
            case _:
                log.warning("load sharing: the hub sent an unknown frame %s", kind_of(frame))

    def _apply(self) -> None:
        self._load.set_peers(self._peers.total(), self._peers.count)


@frozen
class _Message:
    number: int
    at_s: float
    loads: Mapping[str, WorkerLoad]


@define
class ReplicaLoads:
    """Holds each peer's last message, and forgets it after ``silence_s`` without another.

    A message holds everything that the peer has in flight, so messages may be lost, repeated or
    reordered: the next one corrects the sums. Times are seconds of one monotonic clock.
    """

    silence_s: float
    _messages: dict[str, _Message] = field(factory=dict)

    def update(self, peer: str, number: int, loads: Mapping[str, WorkerLoad], now_s: float) -> bool:
        """Take message ``number`` of ``peer``. False when a newer one has already arrived."""
        known = self._messages.get(peer)
        if known is not None and known.number >= number:
            return False
        self._messages[peer] = _Message(number, now_s, loads)
        return True

    def forget(self, peer: str) -> bool:
        """Forget ``peer``, which has announced its stop. False when it was unknown."""
        return self._messages.pop(peer, None) is not None

    def expire(self, now_s: float) -> list[str]:
        """Forget the peers that have been silent for too long; returns their names."""
        oldest_s = now_s - self.silence_s
        silent = [peer for peer, message in self._messages.items() if message.at_s <= oldest_s]
        for peer in silent:
            del self._messages[peer]
        return silent

    @property
    def count(self) -> int:
        """The number of peers whose load is counted."""
        return len(self._messages)

    def total(self) -> dict[str, WorkerLoad]:
        """What all peers together have in flight, by worker."""
        total: dict[str, WorkerLoad] = {}
        for message in self._messages.values():
            for worker_id, load in message.loads.items():
                known = total.get(worker_id)
                total[worker_id] = load if known is None else known + load
        return total

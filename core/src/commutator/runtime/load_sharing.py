"""Tells the other front doors what this one has in flight, and hears the same of them.

The registry's server passes the words on; see docs/decisions/0005-shared-load.md. When that fails,
each front door routes on its own load alone, as if it were the only one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from attrs import frozen

from commutator.engine.wire import FrameProtocol
from commutator.errors import RegistryError
from commutator.routing.contract import WorkerLoad
from commutator.routing.load import InFlightLoad
from commutator.routing.peer_loads import PeerLoads
from commutator.runtime.backoff import Backoff
from commutator.runtime.registry_client import connect

__all__ = ["LoadSharing", "ShareTimes"]

log = logging.getLogger(__name__)

_RECONNECT = Backoff(first_s=0.05, longest_s=2.0)
_MAX_UNSENT_BYTES = 64 << 10
"""Nobody reads: what is told later will be newer anyway."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Loads = dict[str, tuple[_Count, _Count, _Count]]


@frozen
class ShareTimes:
    """In seconds."""

    interval_s: float = 0.05
    """Changes are told at most so often."""
    period_s: float = 0.25
    """Without changes, everything is told again so often."""
    silence_s: float = 1.0
    """A peer that says nothing for so long is dropped from the sums."""


class LoadSharing:
    """Shares ``load`` under ``name`` with everybody at the registry server "host:port"."""

    def __init__(
        self, name: str, load: InFlightLoad, address: str, times: ShareTimes | None = None
    ) -> None:
        self._name = f"{name}-{uuid4().hex[:8]}"  # a new life is a new peer
        self._load = load
        self._address = address
        self._times = times or ShareTimes()
        self._peers = PeerLoads(self._times.silence_s)
        self._connection: FrameProtocol | None = None
        self._number = 0
        self._told: Mapping[str, WorkerLoad] | None = None
        self._told_s = 0.0

    async def run(self) -> None:
        """Until cancelled. Failures are logged; the front door must not fall with them."""
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._stay_connected())
                    group.create_task(self._tick())
            except Exception:
                log.exception("load is not shared any more; trying again")
                await asyncio.sleep(self._times.silence_s)
            finally:
                self._peers = PeerLoads(self._times.silence_s)
                self._apply()

    def _say_goodbye(self) -> None:
        """Who is told of a stop need not wonder about the silence."""
        if self._connection is not None:
            self._number += 1
            self._connection.send(["share", self._name, self._number, None])

    async def _stay_connected(self) -> None:
        backoff = _RECONNECT
        while True:
            lost = asyncio.Event()
            try:
                self._connection = await connect(self._address, self._on_frame, lost.set)
            except RegistryError as error:
                log.log(logging.DEBUG if backoff.failures else logging.WARNING, "%s", error)
            else:
                backoff, self._told = _RECONNECT, None
                try:
                    await lost.wait()
                finally:
                    self._say_goodbye()
                    self._connection.close()
                    self._connection = None
                log.warning("the connection that shares load was lost")
            backoff, wait_s = backoff.after_failure(0.0)
            await asyncio.sleep(wait_s)

    async def _tick(self) -> None:
        """Comparing a few totals now and then costs less than a note of each token would."""
        while True:
            now_s = time.monotonic()
            for peer in self._peers.expire(now_s):
                log.info("front door %s is silent: its load counts no longer", peer)
                self._apply()
            if self._connection is not None:
                self._tell(self._connection, now_s)
            await asyncio.sleep(self._times.interval_s)

    def _tell(self, connection: FrameProtocol, now_s: float) -> None:
        loads = self._load.all_own()
        due = now_s - self._told_s >= self._times.period_s
        if (loads == self._told and not due) or connection.unsent_bytes > _MAX_UNSENT_BYTES:
            return
        self._number += 1
        self._told, self._told_s = loads, now_s
        packed = {worker: _pack(load) for worker, load in loads.items()}
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
                    log.warning("front door %s told a load that cannot be read: %s", peer, error)
                    return
                heard = {worker: WorkerLoad(*counts) for worker, counts in loads.items()}
                if self._peers.hear(peer, number, heard, time.monotonic()):
                    self._apply()
            case _:
                log.warning("the registry sent an unknown frame %r", frame[0])

    def _apply(self) -> None:
        self._load.set_peers(self._peers.total(), self._peers.count)


def _pack(load: WorkerLoad) -> list[int]:
    return [load.active_requests, load.active_prefill_tokens, load.active_decode_blocks]

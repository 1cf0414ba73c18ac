"""Lets other workers read blocks out of one of our tiers' memory, under leases.

The tier's methods run on the tier's own thread, as always: this asks that thread, and talks to the
readers on a thread of its own. The bytes themselves are read by NIXL without anybody's help here.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Protocol, TypeVar

import zmq
import zmq.asyncio

from commutator.errors import CommutatorError
from commutator.kv.export_options import ExportOptions
from commutator.kv.peer_leases import NO_LEASE, LeaseTable
from commutator.kv.peer_wire import (
    PeerAnswer,
    PeerAsk,
    PeerBlock,
    PeerRelease,
    decode_peer_message,
    encode_peer_message,
)
from commutator.kv.tier import SlotGeometry, StorageTier

__all__ = ["OnTier", "PeerExport"]

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_EXPIRY_CHECK_S = 0.25


class OnTier(Protocol):
    """Runs a call on the thread that owns the tier, soon; ``Executor.submit`` is one of these."""

    def __call__(self, call: Callable[[], ResultT], /) -> Future[ResultT]: ...


class PeerExport:
    """Serves one tier in host memory. ``close`` before the tier is closed.

    Whoever can connect can read every block whose key it knows: listen where only workers are.
    """

    def __init__(
        self,
        tier: StorageTier,
        geometry: SlotGeometry,
        *,
        agent_name: str,
        metadata: Callable[[], bytes],
        on_tier: OnTier,
        options: ExportOptions | None = None,
    ) -> None:
        """``metadata`` is that of the agent with which the tier's regions are registered.

        It is called on the tier's thread.
        """
        self._tier = tier
        self._geometry = geometry
        self._agent_name = agent_name
        self._metadata = metadata
        self._on_tier = on_tier
        self._options = options or ExportOptions()
        # Touched on the tier's thread only.
        self._leases = LeaseTable(self._options.lease_s, self._options.max_leased_blocks)
        self._started: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kv-peer-export", daemon=True)

    def start(self) -> str:
        """Listen; the address for readers. Raises zmq.ZMQError when it cannot be listened on."""
        self._thread.start()
        bound = self._started.result()
        if self._options.advertise is None:
            return bound
        return f"tcp://{self._options.advertise}:{bound.rpartition(':')[2]}"

    @property
    def leases(self) -> int:
        """How many have not ended by time."""
        return self._leases.leases

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop answering and end all leases. Reads under way may fail or see other bytes."""
        if self._loop is not None:
            with suppress(RuntimeError):  # It has ended.
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)
        with suppress(CommutatorError, TimeoutError):
            self._on_tier(self._end_leases).result(timeout_s)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        try:
            router.bind(self._options.listen)
        except zmq.ZMQError as error:
            self._started.set_exception(error)
            context.destroy()
            return
        self._started.set_result(router.getsockopt_string(zmq.LAST_ENDPOINT))
        tasks = {asyncio.create_task(self._receive(router)), asyncio.create_task(self._expire())}
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy()

    async def _receive(self, router: zmq.asyncio.Socket) -> None:
        running: set[asyncio.Task[None]] = set()
        while True:
            frames = await router.recv_multipart()
            try:
                message = decode_peer_message(frames[-1])
            except ValueError as error:
                log.warning("kv peer export: a message that is none of ours: %s", error)
                continue
            if isinstance(message, PeerAsk):
                task = asyncio.create_task(self._answer(router, frames[0], message))
                running.add(task)
                task.add_done_callback(running.discard)
            elif isinstance(message, PeerRelease):
                # Not waited for: if it fails, the lease ends by itself.
                self._on_tier(partial(self._release, message))

    async def _answer(self, router: zmq.asyncio.Socket, reader: bytes, ask: PeerAsk) -> None:
        try:
            answer = await asyncio.wait_for(
                asyncio.wrap_future(self._on_tier(partial(self._lend, ask))),
                self._options.answer_timeout_s,
            )
        except (CommutatorError, TimeoutError) as error:
            log.debug("kv peer export: no answer for a reader: %s", error)
            return
        await router.send_multipart([reader, encode_peer_message(answer)])

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_CHECK_S)
            if not self._leases.leases:
                continue
            with suppress(CommutatorError, TimeoutError):
                await asyncio.wrap_future(self._on_tier(self._unpin_expired))

    # What follows runs on the tier's thread.

    def _lend(self, ask: PeerAsk) -> PeerAnswer:
        geometry = self._geometry
        blocks: list[PeerBlock] = []
        if (ask.identity, ask.slot_bytes) == (geometry.identity, geometry.slot_bytes):
            # A block that is asked for twice would be lent twice under one lease.
            keys = list(dict.fromkeys(ask.keys))[: self._leases.room]
            found = takewhile(lambda stored: stored is not None, self._tier.lookup(keys))
            for stored in found:
                assert stored is not None, "takewhile saw to it"
                self._tier.pin(stored.slot)
                span, _ = self._tier.place(stored.slot, stored.size_bytes)
                blocks.append(
                    PeerBlock(
                        slot=stored.slot,
                        address=span.address,
                        size_bytes=stored.size_bytes,
                        device=span.device,
                        checksum=stored.checksum,
                    )
                )
        slots = [block.slot for block in blocks]
        lease = self._leases.grant(slots, time.monotonic()) if slots else NO_LEASE
        return PeerAnswer(
            number=ask.number,
            agent=self._agent_name,
            metadata=self._metadata() if blocks else b"",
            lease=lease,
            lease_s=self._options.lease_s,
            blocks=blocks,
        )

    def _release(self, message: PeerRelease) -> None:
        for slot in self._leases.release(message.lease, message.slots):
            self._tier.unpin(slot)

    def _unpin_expired(self) -> None:
        for slot in self._leases.expire(time.monotonic()):
            self._tier.unpin(slot)

    def _end_leases(self) -> None:
        for slot in self._leases.end_all():
            self._tier.unpin(slot)

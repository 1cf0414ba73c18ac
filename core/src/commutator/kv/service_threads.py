"""Makes the threads of a service's tiers, and lends what lies in host memory to other workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from commutator.kv.codec import identity_with
from commutator.kv.peer_export import PeerExport
from commutator.kv.scattered_arena import Arena
from commutator.kv.staging import PAGE_BYTES, Staging
from commutator.kv.tier import SlotGeometry, Stored
from commutator.kv.tier_call import on_tier
from commutator.kv.tier_setup import TierSetup, slot_bytes
from commutator.kv.tier_thread import TierThread
from commutator.kv.tier_worker import TierWorker
from commutator.transfer import Memory

__all__ = ["STAGING_BLOCKS", "TierCallbacks", "lend", "make_threads"]

log = logging.getLogger(__name__)

STAGING_BLOCKS = 32

TierCallbacks = tuple[
    Callable[[int, Sequence[Stored]], None], Callable[[int], None], Callable[[int, str], None]
]
"""Told a tier's number when it was opened (and with what), when it became usable, and when not."""


def make_threads(
    setups: Sequence[TierSetup],
    arena: Arena,
    scratch: Staging,
    *,
    block_size: int,
    identity: str,
    agent_name: str,
    callbacks: TierCallbacks,
) -> list[TierThread]:
    """One for each tier, not started."""
    on_open, on_up, on_down = callbacks
    threads = []
    for number, setup in enumerate(setups):
        size_bytes = slot_bytes(setup, arena.block_bytes)
        worker = TierWorker(
            setup,
            SlotGeometry(
                block_bytes=arena.block_bytes,
                slot_bytes=size_bytes,
                identity=identity_with(setup.codecs, identity),
                block_tokens=block_size,
            ),
            arena,
            Staging(_whole_pages(size_bytes), STAGING_BLOCKS),
            scratch,
            agent_name=f"{agent_name}/{number}-{setup.name}",
            on_open=partial(on_open, number),
        )
        threads.append(
            TierThread(worker, on_up=partial(on_up, number), on_down=partial(on_down, number))
        )
    return threads


def lend(threads: Sequence[TierThread]) -> tuple[PeerExport, str] | None:
    """Let other workers read the blocks in host memory, if a tier says how; and where they ask.

    None, and a warning where it was wanted, when there is nothing to lend or no way to listen.
    """
    setups = [thread.worker.setup for thread in threads]
    options = next((o for setup in setups if (o := setup.tier.export_options) is not None), None)
    if options is None:
        return None
    for thread in threads:
        worker, tier = thread.worker, thread.worker.setup.tier
        if tier.memory is not Memory.DRAM or not tier.writable or tier.shared:
            continue
        export = PeerExport(
            tier,
            worker.geometry,
            agent_name=worker.agent_name,
            metadata=worker.metadata,
            on_tier=on_tier(thread),
            options=options,
        )
        try:
            address = export.start()
        except zmq.ZMQError as error:
            log.warning("blocks are not lent: cannot listen on %s: %s", options.listen, error)
            return None
        log.info("blocks of tier %s are lent at %s", worker.setup.name, address)
        return export, address
    log.warning("blocks are not lent: no tier of this worker's own keeps them in host memory")
    return None


def _whole_pages(size_bytes: int) -> int:
    """Some tiers can only be read and written so."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES

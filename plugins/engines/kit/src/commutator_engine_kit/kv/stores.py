"""Stores: the blocks that an engine offloads to its tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from attrs import define, field

from commutator.contract.block import BlockDescriptor, BlockKey, CacheIdentity, RetentionHints
from commutator.contract.tier import StoredBlock
from commutator.errors import TierError
from commutator_engine_kit.kv.block_manager.actions import (
    DEVICE,
    Action,
    Announce,
    FreeBlocks,
    JobUrgency,
    ReleaseSource,
    StoreBlocks,
    announced,
)
from commutator_engine_kit.kv.event_queue import settle, uncancellable
from commutator_engine_kit.kv.tier_stack import TierStack
from commutator_engine_kit.kv.tiers.executor import TierExecutor
from commutator_engine_kit.kv.tiers.jobs import TierMove, store_job
from commutator_engine_kit.kv.tiers.staged_io import Staging

__all__ = ["Stores"]


@define(eq=False)
class _Offload:
    """Device blocks that the engine offloads in one call."""

    blocks: int
    """How many are not released yet."""
    future: Future[None] = field(factory=uncancellable)


class Stores:
    """Offloads blocks of the engine, and carries out what the block manager wants done."""

    def __init__(
        self, identity: CacheIdentity, tiers: TierStack, scratch: Staging, *, at_once: bool
    ) -> None:
        """``identity`` is that of blocks without adapter and cache salt.

        ``at_once``: tiers with `write: on_evict` store blocks once they are computed. ``scratch``
        is memory for copies from tier to tier.
        """
        self._identity = identity
        self._tiers = tiers
        self._queue = tiers.queue
        self._scratch = scratch
        self._at_once = at_once
        self._offloads: dict[BlockKey, list[tuple[int, _Offload]]] = {}
        """Device blocks that stores read, or will read."""

    def descriptors(
        self,
        keys: Sequence[BlockKey],
        token_ids: Sequence[int],
        *,
        first: int = 0,
        prompt_blocks: int | None = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> list[BlockDescriptor]:
        """Descriptors of a chain's blocks from ``first`` on, for ``offload``.

        The blocks from ``prompt_blocks`` on belong to the answer. Blocks without ``token_ids``,
        where only their names are known, cause no KV events.
        """
        size = self._identity.block_size
        return [
            BlockDescriptor(
                key=keys[index],
                parent=keys[index - 1] if index else None,
                token_ids=tuple(token_ids[index * size : (index + 1) * size]),
                adapter=adapter,
                facts=RetentionHints(
                    is_prompt=prompt_blocks is None or index < prompt_blocks,
                    tenant=cache_salt,
                    depth=index,
                ),
            )
            for index in range(first, len(keys))
        ]

    def offload(
        self, blocks: Sequence[BlockDescriptor], device_blocks: Sequence[int]
    ) -> Future[None]:
        """Store blocks that the engine computed or reused, in the order of their chain.

        Done when no tier reads the device blocks any more. Offload reused blocks, too: for a block
        that is stored already, this counts as a use. Raises TierError once the tiers are closed.
        """
        offer = partial(self._tiers.manager.offer, at_once=self._at_once)
        return self._offload(blocks, device_blocks, offer)

    def offload_evicted(
        self, blocks: Sequence[BlockDescriptor], device_blocks: Sequence[int]
    ) -> Future[None]:
        """Store blocks that the engine evicts. It may overwrite each once it is released.

        Raises TierError once the tiers are closed.
        """
        return self._offload(blocks, device_blocks, self._tiers.manager.offload_evicted)

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Count a use of blocks that the engine computed or reused and does not offload."""
        with self._queue:
            self._tiers.manager.used(keys)

    def admissible(self, blocks: Sequence[BlockDescriptor]) -> set[BlockKey]:
        """The keys of blocks that no tier has, and that a tier would store if evicted now."""
        with self._queue:
            return self._tiers.manager.admissible(blocks)

    def evict(
        self,
        keys: Iterable[BlockKey] | None = None,
        tier: str | None = None,
        reason: str = "asked",
    ) -> None:
        """Remove blocks (None: all) from one tier or all. ``reason`` names the counter."""
        names = [thread.worker.setup.name for thread in self._tiers.threads]
        number = None if tier is None else names.index(tier)
        with self._queue:
            manager, now_s = self._tiers.manager, time.monotonic()
            self.carry_out(manager.evict(now_s, keys=keys, tier=number, reason=reason))

    # What follows is for the connector, and called with the lock held.

    def fail(self, error: TierError) -> None:
        """Fail the futures of all offloads: no thread is left to end them."""
        for sources in self._offloads.values():
            for _, offload in sources:
                self._queue.after(partial(settle, offload.future, error))

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Do what the block manager decided."""
        for action in actions:
            match action:
                case Announce():
                    self._queue.report(events=announced(action, self._identity.block_size))
                case ReleaseSource():
                    self._queue.report(released=[self._released(key) for key in action.keys])
                case FreeBlocks():
                    self._tiers.threads[action.tier].submit(JobUrgency.FREE, partial(_free, action))
                case StoreBlocks():
                    self._store(action)

    def _offload(
        self,
        blocks: Sequence[BlockDescriptor],
        device_blocks: Sequence[int],
        take: Callable[[Sequence[BlockDescriptor], float], list[Action]],
    ) -> Future[None]:
        if len(blocks) != len(device_blocks):
            raise ValueError(f"{len(blocks)} blocks, but {len(device_blocks)} device blocks")
        offload = _Offload(len(blocks))
        with self._queue:
            self._tiers.must_be_open()
            for block, device_block in zip(blocks, device_blocks, strict=True):
                self._offloads.setdefault(block.key, []).append((device_block, offload))
            self.carry_out(take(blocks, time.monotonic()))
        if not blocks:
            settle(offload.future, None)
        return offload.future

    def _released(self, key: BlockKey) -> int:
        sources = self._offloads[key]
        device_block, offload = sources.pop()
        if not sources:
            del self._offloads[key]
        offload.blocks -= 1
        if not offload.blocks:
            self._queue.after(partial(settle, offload.future, None))
        return device_block

    def _store(self, action: StoreBlocks) -> None:
        target = self._tiers.threads[action.target]
        done = partial(self._stored, action.move_id)
        if action.source == DEVICE:
            keys = [block.key for block in action.offers]
            spans = [self._tiers.arena.span(self._offloads[key][-1][0]) for key in keys]
            job = store_job(action.offers, spans, from_engine=True, done=done)
            target.submit(action.priority, job)
            return
        TierMove(
            offers=list(action.offers),
            source=self._tiers.threads[action.source],
            target=target,
            scratch=self._scratch,
            urgency=action.priority,
            done=done,
        ).start()

    def _stored(self, move_id: int, stored: list[StoredBlock], failed: dict[BlockKey, str]) -> None:
        with self._queue:
            now_s = time.monotonic()
            self.carry_out(self._tiers.manager.finish_store(move_id, stored, failed, now_s))


def _free(action: FreeBlocks, worker: TierExecutor | None) -> Generator[None, None, None]:
    if worker is not None:
        worker.free(action.keys, makes_room=action.makes_room)
    yield from ()

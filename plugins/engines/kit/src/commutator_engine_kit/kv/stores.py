"""Stores: the blocks that an engine offloads to its tiers, and that move from tier to tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from attrs import define, field

from commutator.contract.block import BlockDescriptor, BlockKey, RetentionHints
from commutator.contract.tier import Memory, Span, StoredBlock
from commutator.errors import TierError
from commutator_engine_kit.kv.block_manager.actions import (
    DEVICE,
    Action,
    Announce,
    FreeBlocks,
    JobUrgency,
    LoadResult,
    ReleaseSource,
    StoreBlocks,
    announced,
)
from commutator_engine_kit.kv.groups import KvGroup, alignment, announced_group, is_behind
from commutator_engine_kit.kv.tier_stack import TierStack, settle, uncancellable
from commutator_engine_kit.kv.tiers.block_io import Staging
from commutator_engine_kit.kv.tiers.executor import Job, TierExecutor, TierThread
from commutator_engine_kit.kv.tiers.mover import IoContext

PART_BLOCKS = 16
"""Blocks in a part of a job. A more urgent job may run between two parts."""

_MOST_BLOCKS = 256
_STORE_BYTES = {Memory.OBJ: 32 << 20}
_OTHER_STORE_BYTES = 64 << 20
"""About 10 ms in memory and 30 ms on a disk: long compared with the work between two parts. Objects
take far longer, so their parts are smaller."""

_OnStored = Callable[[list[StoredBlock], dict[BlockKey, str]], None]
"""Called exactly once with the stored blocks, and with the reasons for the others."""


def part_blocks(block_bytes: int, memory: Memory) -> int:
    """Blocks in a part of a store into a tier: more where blocks are small."""
    part_bytes = _STORE_BYTES.get(memory, _OTHER_STORE_BYTES)
    return min(_MOST_BLOCKS, max(PART_BLOCKS, part_bytes // block_bytes))


def store_job(
    offers: Sequence[BlockDescriptor],
    sources: Sequence[Span],
    *,
    from_engine: bool,
    done: _OnStored,
) -> Job:
    """Store blocks whose bytes are in memory, in parts."""

    def run(worker: TierExecutor | None) -> Generator[None, None, None]:
        stored: list[StoredBlock] = []
        failed: dict[BlockKey, str] = {}
        try:
            step = PART_BLOCKS
            if sources and worker is not None:
                step = part_blocks(sources[0].size_bytes, worker.setup.tier.memory)
            for start in range(0, len(offers), step):
                end = start + step
                if worker is None or not worker.is_open:
                    failed |= {offer.key: "tier is down" for offer in offers[start:end]}
                    continue
                if start:
                    yield
                context = IoContext(time.monotonic() + worker.setup.config.store_timeout_s)
                outcome = worker.store(
                    offers[start:end], sources[start:end], context, from_engine=from_engine
                )
                stored += outcome.stored
                failed |= outcome.failed
        finally:
            # Also when the thread stops between two parts.
            done(stored, failed)

    return run


@define(eq=False, kw_only=True)
class TierMove:
    """Moves blocks between tiers in parts: reads on the source's thread, stores on the target's.

    ``done`` is called exactly once, on either thread.
    """

    _offers: list[BlockDescriptor]
    """The blocks that are not read yet."""
    _source: TierThread
    _target: TierThread
    _scratch: Staging
    _urgency: JobUrgency
    _done: _OnStored
    _stored: list[StoredBlock] = field(init=False, factory=list)
    _failed: dict[BlockKey, str] = field(init=False, factory=dict)

    def start(self) -> None:
        """Read the next blocks, or call ``done`` when there are none."""
        if self._offers:
            self._source.submit(self._urgency, self._read)
        else:
            self._done(self._stored, self._failed)

    def _read(self, worker: TierExecutor | None) -> None:
        if worker is None:
            self._failed |= {offer.key: "tier is down" for offer in self._offers}
            self._offers.clear()
            self.start()
            return
        slots = self._scratch.take(min(PART_BLOCKS, len(self._offers)))
        if not slots:
            self._scratch.take_later(self.start)
            return
        batch = self._offers[: len(slots)]
        del self._offers[: len(slots)]
        spans = [self._scratch.arena.span(slot) for slot in slots]
        users = dict.fromkeys(slots, 2)  # the read, and the store after it

        def done_with(slot: int) -> None:
            users[slot] -= 1
            if not users[slot]:
                self._scratch.give_back([slot])

        results = [LoadResult.FAILED] * len(batch)
        try:
            results = worker.load(
                [offer.key for offer in batch],
                spans,
                IoContext(time.monotonic() + worker.setup.config.load_timeout_s),
                to_engine=False,
                on_released=lambda position: done_with(slots[position]),
            )
        finally:
            self._write(batch, results, slots, done_with)

    def _write(
        self,
        batch: Sequence[BlockDescriptor],
        results: Sequence[LoadResult],
        slots: Sequence[int],
        done_with: Callable[[int], None],
    ) -> None:
        """Store the blocks that were read, then continue with the next ones."""
        good: list[int] = []
        for position, (offer, result) in enumerate(zip(batch, results, strict=True)):
            if result is LoadResult.LOADED:
                good.append(position)
            else:
                self._failed[offer.key] = f"{result.value} at its source"
                done_with(slots[position])

        def written(stored: list[StoredBlock], failed: dict[BlockKey, str]) -> None:
            self._stored += stored
            self._failed |= failed
            for position in good:
                done_with(slots[position])
            self.start()

        self._target.submit(
            self._urgency,
            store_job(
                [batch[position] for position in good],
                [self._scratch.arena.span(slots[position]) for position in good],
                from_engine=False,
                done=written,
            ),
        )


@define(eq=False)
class _Offload:
    """Device blocks that the engine offloads in one call."""

    blocks: int
    """How many are not released yet."""
    future: Future[None] = field(factory=uncancellable)


class Stores:
    """Offloads blocks of the engine, and carries out what the block manager wants done."""

    def __init__(
        self, groups: Sequence[KvGroup], tiers: TierStack, scratch: Staging, *, at_once: bool
    ) -> None:
        """``groups`` are the model's kinds of KV.

        ``at_once``: tiers with `write: on_evict` store blocks once they are computed. ``scratch``
        is memory for copies from tier to tier.
        """
        self._groups = groups
        self._announced = announced_group(groups)
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
        group: int = 0,
    ) -> list[BlockDescriptor]:
        """Descriptors of a group's blocks from ``first`` on, for ``offload``.

        The blocks from ``prompt_blocks`` on belong to the answer. Blocks without ``token_ids``,
        where only their names are known, cause no KV events; nor do those of other groups than
        the first that needs the whole prefix, which is the one that routers follow.
        """
        size, step = self._groups[group].block_size, alignment(self._groups)
        if group != self._announced:
            token_ids = ()
        prompt = 0 if prompt_blocks is None else prompt_blocks * self._groups[0].block_size
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
                    behind=is_behind(self._groups[group], index, prompt, step),
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
                    if self._announced is not None:
                        size = self._groups[self._announced].block_size
                        self._queue.report(events=announced(action, size))
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


def _free(action: FreeBlocks, worker: TierExecutor | None) -> None:
    if worker is not None:
        worker.free(action.keys, makes_room=action.makes_room)

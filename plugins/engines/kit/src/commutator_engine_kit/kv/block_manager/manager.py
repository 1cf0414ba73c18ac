"""The KV block manager: decides which tier stores which blocks.

A pure state machine: methods report events and return actions, which the caller carries out in
order. No I/O, no threads, no clock: ``now_s`` is an argument, and must not run backwards.

    offer, offload_evicted  --> StoreBlocks --> finish_store --> Announce, ReleaseSource
    begin_onboard (pins)       --> the blocks are read and verified --> finish_onboard
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from commutator.contract.block import BlockDescriptor, BlockKey
from commutator.contract.tier import StoredBlock
from commutator.contract.worker import (
    BlockExplanation,
    EdgeStatistics,
    HeldBlock,
    KvStatistics,
    TierState,
)
from commutator_engine_kit.kv.block_manager.actions import DEVICE, Action, FreeBlocks, LoadResult
from commutator_engine_kit.kv.block_manager.block_pool import TierBlockPool, TierSpec
from commutator_engine_kit.kv.block_manager.index import BlockIndex, UseCounts
from commutator_engine_kit.kv.block_manager.offload import OffloadScheduler
from commutator_engine_kit.kv.block_manager.onboard import (
    GroupChain,
    GroupPlan,
    OnboardPlan,
    OnboardScheduler,
    group_blocks,
    prefetch,
)


class BlockManager:
    """The blocks of one engine over its tiers, fastest first.

    At most ``most_waiting`` blocks wait for room in each tier. A tier whose loads were slower than
    computing is measured again after ``probe_interval_s``. For the last ``remembered`` blocks, the
    reason why they are in no tier is recorded for ``explain``, and the number of their uses where
    an admission rule looks at it.
    """

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        *,
        most_waiting: int = 4096,
        probe_interval_s: float = 30.0,
        remembered: int = 65_536,
    ) -> None:
        self.tiers = tuple(tiers)
        self._pools = [TierBlockPool(number, spec) for number, spec in enumerate(tiers)]
        self._index = BlockIndex(self._pools, remembered)
        counts = any(spec.admission.min_hits > 1 for spec in tiers)
        self._uses = UseCounts(remembered) if counts else None
        self._stores = OffloadScheduler(self._index, self._uses, most_waiting)
        self._loads = OnboardScheduler(self._index, self._uses, probe_interval_s)

    def recovered(self, tier: int, blocks: Iterable[StoredBlock], now_s: float) -> list[Action]:
        """Blocks that a tier had when it was opened. Those beyond its capacity are freed."""
        pool = self._pools[tier]
        new, room = self._index.unknown(pool, blocks), pool.free
        actions = self._index.publish(pool, new[:room], now_s)
        if over := tuple(offer.key for offer in new[room:]):
            actions.append(FreeBlocks(tier=tier, keys=over, reason="over capacity"))
        return self._settled(actions, now_s)

    def opened(
        self, tier: int, capacity: int, blocks: Sequence[StoredBlock], now_s: float
    ) -> list[Action]:
        """A tier was opened after ``tier_down``, for the first time or again, with these blocks."""
        pool = self._pools[tier]
        pool.resize(capacity)
        actions: list[Action] = []
        if not pool.spec.shared:
            there = {block.key for block in blocks}
            gone = [
                key
                for key, node in self._index.nodes.items()
                if node.published & pool.bit and key not in there
            ]
            actions += self._index.unpublish(pool, gone, "lost", free=False)
        return actions + self.recovered(tier, blocks, now_s)

    def found(self, tier: int, blocks: Sequence[StoredBlock], now_s: float) -> list[Action]:
        """A look-up found these blocks in a shared tier; older ones are evicted for them."""
        pool = self._pools[tier]
        new = self._index.unknown(pool, blocks)
        actions = self._stores.make_room_now(pool, new, now_s)
        room = pool.free
        actions += self._index.publish(pool, new[:room], now_s)
        if over := tuple(offer.key for offer in new[room:]):
            # Blocks that are read or stored fill the room, but the tier has slots for these, too.
            actions.append(FreeBlocks(tier=tier, keys=over, reason="over capacity"))
        return self._settled(actions, now_s)

    def match(self, keys: Sequence[BlockKey], first: int = 0) -> list[int]:
        """The fastest tier of each of the consecutive keys from ``first``; ends at a missing one.

        Ignores tiers that are down. Changes nothing.
        """
        return self._index.match(keys, first)

    def begin_onboard(
        self,
        load_id: str,
        keys: Sequence[BlockKey],
        first: int,
        now_s: float,
        *,
        compute_s: float | None,
    ) -> OnboardPlan:
        """Choose the blocks to load of a prompt. The device has the first ``first`` blocks.

        ``compute_s`` is the time in which the engine computes a block of a prompt; None while it is
        unknown: then everything is loaded. The plan's blocks are pinned until
        ``finish_onboard``; a plan without blocks needs no such call. Raises
        ValueError when a load of that id runs.
        """
        return self._loads.begin(load_id, keys, first, now_s, compute_s)

    def begin_group_onboard(
        self,
        load_id: str,
        chains: Sequence[GroupChain],
        limit_tokens: int,
        now_s: float,
        *,
        token_s: float | None,
    ) -> GroupPlan:
        """As ``begin_onboard``, for a model with several groups of KV.

        Chooses a boundary of at most ``limit_tokens``, which device and tiers together can serve in
        every group, and plans all that is needed there and is not on the device. ``token_s`` is the
        time in which the engine computes a token of a prompt.
        """
        return self._loads.begin_groups(load_id, chains, limit_tokens, now_s, token_s)

    def holders(self, keys: Iterable[BlockKey]) -> list[int | None]:
        """The fastest tier that can load each block; None: none can. Changes nothing."""
        return self._index.holders(keys)

    def finish_onboard(
        self,
        load_id: str,
        results: Mapping[BlockKey, LoadResult],
        now_s: float,
        *,
        seconds: Mapping[int, float] | None = None,
    ) -> list[Action]:
        """A load ended, or was cancelled. Keys without a result were not read.

        ``seconds`` is how long the reads took, by tier, without the time in queues. None: the time
        since ``begin_onboard``, if only one tier was read. Raises ValueError for an unknown load.
        """
        actions = self._loads.finish(load_id, results, now_s, seconds)
        return self._settled(actions, now_s)

    def prefetch(self, keys: Sequence[BlockKey], first: int, now_s: float) -> list[Action]:
        """Copy a prompt's blocks to the fastest writable tier, if that tier allows prefetches.

        The device has the first ``first`` blocks.
        """
        tiers = self._index.match(keys, first)
        found = list(zip(keys[first : first + len(tiers)], tiers, strict=True))
        return self._prefetched(found, set(keys), now_s)

    def prefetch_groups(
        self, chains: Sequence[GroupChain], limit_tokens: int, now_s: float
    ) -> list[Action]:
        """As ``prefetch``, what all groups need at the last boundary that they can serve."""
        found = group_blocks(self._index, chains, limit_tokens)
        return self._prefetched(found, {key for key, _ in found}, now_s)

    def _prefetched(
        self, found: Sequence[tuple[BlockKey, int]], spared: set[BlockKey], now_s: float
    ) -> list[Action]:
        return self._settled(prefetch(self._index, self._stores, found, spared, now_s), now_s)

    def offer(
        self, offers: Sequence[BlockDescriptor], now_s: float, *, at_once: bool = False
    ) -> list[Action]:
        """The device computed or reused these blocks, in the order of their chain.

        They are written to every "through" tier. An offer of a stored block counts as a use, so
        offer reused blocks, too; a block that was just loaded counts only once. Each offer's device
        block is held until a ``ReleaseSource`` with its key, which may be in the answer.
        ``at_once``: also write to the tier for blocks that the device evicts, for engines that do
        not report evictions.
        """
        loaded = self._counted([offer.key for offer in offers])
        targets = [pool for pool in self._pools if pool.spec.write == "through"]
        if at_once and (below := self._stores.below(DEVICE)) is not None:
            targets.append(below)
        return self._settled(self._stores.from_device(offers, targets, now_s, loaded), now_s)

    def used(self, keys: Iterable[BlockKey]) -> None:
        """The device computed or reused these blocks, and does not offer them now.

        For engines that offer only evicted blocks: admission rules may need the number of uses.
        """
        self._counted(list(keys))

    def admissible(self, offers: Sequence[BlockDescriptor]) -> set[BlockKey]:
        """The keys that no tier has and ``offload_evicted`` would store. Changes nothing."""
        stores, below = self._stores, self._stores.below(DEVICE)
        if below is None:
            return set()
        new = (offer for offer in offers if offer.key not in self._index.nodes)
        return {offer.key for offer in new if stores.refusal(below, offer) is None}

    def offload_evicted(self, offers: Sequence[BlockDescriptor], now_s: float) -> list[Action]:
        """The device evicts these blocks. It may reuse each after ``ReleaseSource`` with its key.

        They are written to the first writable tier that is up, if its ``write`` is "on_evict".
        """
        below = self._stores.below(DEVICE)
        targets = [below] if below is not None else []
        return self._settled(self._stores.from_device(offers, targets, now_s), now_s)

    def finish_store(
        self,
        move_id: int,
        stored: Sequence[StoredBlock],
        failed: Mapping[BlockKey, str],
        now_s: float,
    ) -> list[Action]:
        """A ``StoreBlocks`` ended. ``failed`` has a short reason for each key; it names a counter.

        Blocks in neither argument count as failed. Raises ValueError for an unknown move.
        """
        return self._settled(self._stores.finish(move_id, stored, failed, now_s), now_s)

    def tier_down(self, tier: int, now_s: float) -> list[Action]:
        """Stop loads from and stores to this tier. Its blocks remain in the index.

        Running loads and moves must still be finished.
        """
        pool = self._pools[tier]
        pool.up = False
        self._index.up &= ~pool.bit
        actions: list[Action] = []
        self._stores.refuse_waiting(pool, list(pool.waiting), "tier is down", actions)
        return self._settled(actions, now_s)

    def tier_up(self, tier: int, now_s: float) -> list[Action]:
        """Resume loads from and stores to this tier."""
        pool = self._pools[tier]
        pool.up = True
        self._index.up |= pool.bit
        return self._settled([], now_s)

    def evict(
        self,
        now_s: float,
        *,
        keys: Iterable[BlockKey] | None = None,
        tier: int | None = None,
        reason: str = "asked",
    ) -> list[Action]:
        """Remove blocks from one tier or all, whatever their retention. ``keys`` None: all blocks.

        Blocks that are being stored are freed once they are stored.
        """
        chosen = None if keys is None else list(keys)
        actions: list[Action] = []
        for pool in self._pools if tier is None else [self._pools[tier]]:
            nodes = self._index.nodes
            those = list(nodes) if chosen is None else [key for key in chosen if key in nodes]
            pool.cancelled.update(key for key in those if nodes[key].staged & pool.bit)
            waiting = pool.waiting if chosen is None else [k for k in chosen if k in pool.waiting]
            self._stores.refuse_waiting(pool, list(waiting), reason, actions)
            actions += self._index.unpublish(pool, those, reason)
        return self._settled(actions, now_s)

    def clear(self, now_s: float) -> list[Action]:
        """Remove everything from every tier."""
        return self.evict(now_s, reason="cleared")

    def explain(
        self, keys: Sequence[BlockKey], now_s: float, first: int = 0
    ) -> list[BlockExplanation]:
        """For each block of a prompt: which tiers have it, and whether it would be reused."""
        answers: list[BlockExplanation] = []
        broken = False
        for position, key in enumerate(keys):
            held = tuple(_held(self._index, key, now_s))
            node = self._index.nodes.get(key)
            tiers = node.published & self._index.up if node is not None else 0
            tier = (tiers & -tiers).bit_length() - 1 if tiers else None
            if position < first:
                reusable, tier, reason = True, None, "on the device"
            elif broken:
                reusable, tier, reason = False, None, "a block before it is missing"
            elif tier is not None:
                reusable, reason = True, f"in {self._pools[tier].spec.name}"
            else:
                reusable, broken = False, True
                reason = _missing(self._index, key, held)
            answers.append(
                BlockExplanation(
                    key=key.hex(),
                    held=held,
                    reusable=reusable,
                    tier=None if tier is None else self._pools[tier].spec.name,
                    reason=reason,
                )
            )
        return answers

    def statistics(self) -> KvStatistics:
        """All counters and states."""
        stores = self._stores
        names = {DEVICE: "device"} | {pool.number: pool.spec.name for pool in self._pools}
        return KvStatistics(
            tiers=tuple(_state(pool) for pool in self._pools),
            edges=tuple(
                EdgeStatistics(
                    source=names[source],
                    target=names[target],
                    stored=edge.stored,
                    not_admitted=dict(edge.not_admitted),
                    failed=dict(edge.failed),
                )
                for (source, target), edge in sorted(stores.edges.items())
            ),
            blocks=len(self._index.nodes),
            held_on_device=len(stores.holds),
            loads_running=len(self._loads.running),
            stores_running=len(stores.moves),
        )

    def _counted(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Count uses, except of blocks counted when they were loaded; return those."""
        loaded = self._index.take_loaded(keys)
        if self._uses is not None:
            for key in keys:
                if key not in loaded:
                    self._uses.used(key)
        return loaded

    def _settled(self, actions: list[Action], now_s: float) -> list[Action]:
        self._stores.settle(now_s, actions)
        return actions + self._stores.take_released()


def _state(pool: TierBlockPool) -> TierState:
    cost = pool.speed.cost
    return TierState(
        name=pool.spec.name,
        medium=pool.spec.medium,
        up=pool.up,
        capacity=pool.capacity,
        published=pool.published,
        staged=pool.staged,
        leaving=len(pool.leaving),
        waiting=len(pool.waiting),
        loading=len(pool.pins),
        retained=pool.retention.pinned,
        pins_refused=pool.retention.pins_refused,
        loads=dict(pool.counts.loads),
        not_loaded=dict(pool.counts.not_loaded),
        removed=dict(pool.counts.removed),
        prefetched=dict(pool.counts.prefetched),
        latency_s=cost.latency_s if cost is not None else None,
        block_s=cost.block_s if cost is not None else None,
    )


def _held(index: BlockIndex, key: BlockKey, now_s: float) -> list[HeldBlock]:
    node = index.nodes.get(key)
    if node is None:
        return []
    held: list[HeldBlock] = []
    for pool in index.pools:
        name = pool.spec.name
        if node.published & pool.bit:
            held.append(HeldBlock(name=name, state="published", note=_note(pool, key, now_s)))
        elif node.staged & pool.bit:
            held.append(HeldBlock(name=name, state="being stored"))
        elif node.evicting & pool.bit:
            held.append(HeldBlock(name=name, state="leaving"))
    return held


def _note(pool: TierBlockPool, key: BlockKey, now_s: float) -> str:
    notes = [] if pool.up else ["tier is down"]
    notes += ["moving down"] if key in pool.moving_down else []
    if (retained := pool.retention.note(key, now_s)) is not None:
        notes.append(retained)
    return ", ".join(notes)


def _missing(index: BlockIndex, key: BlockKey, held: Sequence[HeldBlock]) -> str:
    if held:
        return ", ".join(
            f"{copy.name}: {copy.note if copy.state == 'published' else copy.state}"
            for copy in held
        )
    waiting = [pool.spec.name for pool in index.pools if key in pool.waiting]
    if waiting:
        return f"waiting for room in {waiting[0]}"
    return index.fates.of(key) or "never offered"

"""Offloading: admission to a tier, room in it, moves, and the release of their sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, islice

from attrs import evolve, frozen

from commutator.contract.block import PLAIN, BlockDescriptor, BlockKey, supersedes
from commutator.contract.tier import AdmissionConfig, StoredBlock
from commutator_engine_kit.kv.block_manager.actions import (
    DEVICE,
    Action,
    FreeBlocks,
    JobUrgency,
    ReleaseSource,
    StoreBlocks,
)
from commutator_engine_kit.kv.block_manager.block_pool import (
    EdgeCounts,
    Rank,
    TierBlockPool,
    Waiting,
    count,
    rank_of,
)
from commutator_engine_kit.kv.block_manager.index import BlockIndex, UseCounts


@frozen
class Move:
    """Blocks on their way from the device or a tier to a tier."""

    source: int
    target: int
    offers: tuple[BlockDescriptor, ...]


class OffloadScheduler:
    """Tracks, for each move, the blocks held in its source and the room taken in its target."""

    def __init__(self, index: BlockIndex, uses: UseCounts | None, most_waiting: int) -> None:
        self.index = index
        self.moves: dict[int, Move] = {}
        self.holds = _Holds()
        self.edges: dict[tuple[int, int], EdgeCounts] = {}
        self._pools = index.pools
        self._uses = uses
        self._most_waiting = most_waiting
        self._last_move_id = 0

    def from_device(
        self,
        offers: Sequence[BlockDescriptor],
        targets: Iterable[TierBlockPool],
        now_s: float,
        loaded: Collection[BlockKey] = (),
    ) -> list[Action]:
        """Store blocks of the device, which are held until no store reads them.

        The uses of those in ``loaded`` were counted when they were loaded.
        """
        actions: list[Action] = []
        for offer in offers:
            self.holds.offered(offer.key)
            self._strengthen_pending(offer)
        spared = {offer.key for offer in offers} | {offer.parent for offer in offers}
        for pool in targets:
            for offer in self._unstored(pool, offers, now_s, loaded):
                self.enqueue(pool, offer, DEVICE, now_s, actions, spared)
        self.settle(now_s, actions, spared)
        self.holds.release_idle(offer.key for offer in offers)
        return actions

    def finish(
        self,
        move_id: int,
        stored: Sequence[StoredBlock],
        failed: Mapping[BlockKey, str],
        now_s: float,
    ) -> list[Action]:
        """A move ended. Blocks in neither ``stored`` nor ``failed`` count as failed."""
        move = self.moves.pop(move_id, None)
        if move is None:
            raise ValueError(f"there is no move {move_id}: it was finished, or never started")
        pool, edge = self._pools[move.target], self._edge(move.source, move.target)
        written = {block.key for block in stored}
        actions: list[Action] = []
        good: list[BlockDescriptor] = []
        cancelled: list[BlockKey] = []
        bad: list[BlockKey] = []
        for offer in move.offers:
            key = offer.key
            latest = pool.staged_offers.pop(key)
            if key in written and key not in pool.cancelled:
                good.append(latest)
                node = self.index.nodes[key]
                if supersedes(latest.facts, node.offer.facts):
                    node.offer = latest
                continue
            if key in written:
                cancelled.append(key)
            else:
                bad.append(key)
                reason = failed.get(key, "not reported")
                count(edge.failed, reason)
                self.index.fates.note(key, f"not stored in {pool.spec.name}: {reason}")
            self.index.unstage(pool, key)
        edge.stored += len(good)
        if move.source > move.target:
            pool.prefetched.update(offer.key for offer in good)
            count(pool.counts.prefetched, "brought", len(good))
        actions += self.index.publish(pool, good, now_s)
        if cancelled:
            actions.append(FreeBlocks(tier=pool.number, keys=tuple(cancelled), reason="asked"))
        self._release_source(move.source, [offer.key for offer in good], actions, "moved down")
        self._release_source(move.source, cancelled + bad, actions, "evicted")
        self.settle(now_s, actions)
        return actions

    def refuse_waiting(
        self, pool: TierBlockPool, keys: Iterable[BlockKey], reason: str, actions: list[Action]
    ) -> None:
        """Remove blocks that wait for room in a tier."""
        for key in keys:
            waiting = pool.waiting.pop(key)
            pool.quota.gone(key)
            self._refused(pool, waiting, reason)
            self._release_source(waiting.source, [key], actions, "evicted")

    def settle(
        self, now_s: float, actions: list[Action], spared: Collection[BlockKey | None] = ()
    ) -> None:
        """Make room for waiting blocks, fastest tier first, and start the moves that have room."""
        for pool in self._pools:
            if pool.waiting:
                self._make_room(pool, now_s, actions, spared)
        for pool in reversed(self._pools):
            if pool.waiting and pool.free > 0:
                self._start(pool, actions)

    def drop(
        self, pool: TierBlockPool, victims: Sequence[BlockKey], now_s: float, actions: list[Action]
    ) -> None:
        """Evict blocks, after storing those that the next tier accepts there."""
        below = None if pool.spec.write == "never" else self.below(pool.number)
        gone: list[BlockKey] = []
        for key in reversed(victims):  # the most valuable first, as in a chain
            offer = self.index.nodes[key].offer
            if offer.facts.behind and not pool.retention.is_behind(key):
                offer = evolve(offer, facts=evolve(offer.facts, behind=False))  # it was used
            if below is not None and self.enqueue(below, offer, pool.number, now_s, actions):
                pool.pin(key)
                pool.moving_down.add(key)
                pool.retention.removed(key, evicted=True)
                pool.quota.gone(key)
            else:
                gone.append(key)
        actions += self.index.unpublish(pool, gone, "evicted")

    def make_room_now(
        self, pool: TierBlockPool, offers: Sequence[BlockDescriptor], now_s: float
    ) -> list[Action]:
        """Evict to make room for blocks that were found in the tier."""
        actions: list[Action] = []
        short = len(offers) - pool.free
        if short > 0:
            near = {offer.key for offer in offers} | {offer.parent for offer in offers}
            pins = pool.pins
            victims = pool.retention.victims(
                short, lambda key: key not in pins and key not in near, now_s, rank_of(PLAIN)
            )
            self.drop(pool, victims, now_s, actions)
        return actions

    def below(self, number: int) -> TierBlockPool | None:
        """The next writable tier that is up, if its ``write`` is "on_evict"."""
        lower = (pool for pool in self._pools[number + 1 :] if pool.spec.write != "never")
        pool = next((pool for pool in lower if pool.up), None)
        return pool if pool is not None and pool.spec.write == "on_evict" else None

    def take_released(self) -> list[Action]:
        """Release the device blocks that no store reads since the last call."""
        keys = self.holds.take_released()
        return [ReleaseSource(keys=keys)] if keys else []

    def _strengthen_pending(self, offer: BlockDescriptor) -> None:
        """Apply a stronger retention to blocks that wait for room or are staged."""
        key = offer.key
        for pool in self._pools:
            waiting, staged = pool.waiting.get(key), pool.staged_offers.get(key)
            if waiting is not None and supersedes(offer.facts, waiting.offer.facts):
                pool.waiting[key] = Waiting(offer, waiting.source)
            if staged is not None and supersedes(offer.facts, staged.facts):
                pool.staged_offers[key] = offer

    def _unstored(
        self,
        pool: TierBlockPool,
        offers: Sequence[BlockDescriptor],
        now_s: float,
        loaded: Collection[BlockKey],
    ) -> list[BlockDescriptor]:
        """Blocks that the tier lacks. The others count as used, the last of a chain first."""
        new: list[BlockDescriptor] = []
        present = Counter[str]()
        for offer in reversed(offers):
            reason = self.index.presence(pool, offer.key)
            if reason is None:
                new.append(offer)
                continue
            present[reason] += 1
            if reason == "present" and (offer.key not in loaded or not offer.facts.is_plain):
                node = self.index.nodes[offer.key]
                if supersedes(offer.facts, node.offer.facts):
                    node.offer = offer
                pool.retention.offered_again(offer.key, offer.parent, offer.facts, now_s)
                pool.quota.touched(offer.key)
        for reason, blocks in present.items():
            count(self._edge(DEVICE, pool.number).not_admitted, reason, blocks)
        new.reverse()
        return new

    def enqueue(
        self,
        pool: TierBlockPool,
        offer: BlockDescriptor,
        source: int,
        now_s: float,
        actions: list[Action],
        spared: Collection[BlockKey | None] = (),
    ) -> bool:
        """Let a block wait for room; False, and counted, when the tier does not take it."""
        waiting = Waiting(offer, source)
        if (reason := self.refusal(pool, offer)) is not None:
            self._refused(pool, waiting, reason)
            return False
        tenant = offer.facts.tenant
        if pool.quota.enabled and pool.quota.is_full(tenant):
            own = pool.quota.oldest(tenant, lambda k: k not in pool.pins and k not in spared)
            if own is None:
                self._refused(pool, waiting, "tenant quota")
                return False
            self.drop(pool, [own], now_s, actions)
        pool.waiting[offer.key] = waiting
        pool.quota.claim(offer.key, tenant)
        if source == DEVICE:
            self.holds.needed(offer.key)
        return True

    def refusal(self, pool: TierBlockPool, offer: BlockDescriptor) -> str | None:
        """Why the tier does not take the block, or None."""
        if not pool.up:
            return "tier is down"
        if (reason := self.index.presence(pool, offer.key)) is not None:
            return reason
        if len(pool.waiting) >= self._most_waiting:
            return "too many waiting"
        uses = self._uses[offer.key] if self._uses is not None else 0
        return _not_admitted(pool.spec.admission, offer, uses)

    def _make_room(
        self,
        pool: TierBlockPool,
        now_s: float,
        actions: list[Action],
        spared: Collection[BlockKey | None],
    ) -> None:
        short = len(pool.waiting) - pool.free - len(pool.moving_down)
        if short <= 0:
            return
        # The last of the least important need victims, none of them more important than they are.
        ordered = sorted(pool.waiting.values(), key=_importance, reverse=True)[-short:]
        pins = pool.pins
        for rank, group in groupby(ordered, key=_importance):
            members = list(group)
            victims = pool.retention.victims(
                len(members), lambda key: key not in pins and key not in spared, now_s, rank
            )
            self.drop(pool, victims, now_s, actions)
            without = [waiting.offer.key for waiting in members[len(victims) :]]
            self.refuse_waiting(pool, without, "no room", actions)

    def _start(self, pool: TierBlockPool, actions: list[Action]) -> None:
        by_source: dict[int, list[BlockDescriptor]] = {}
        for waiting in list(islice(pool.waiting.values(), pool.free)):
            del pool.waiting[waiting.offer.key]
            by_source.setdefault(waiting.source, []).append(waiting.offer)
        for source, offers in by_source.items():
            self._last_move_id += 1
            move = Move(source, pool.number, tuple(offers))
            self.moves[self._last_move_id] = move
            self.index.stage(pool, offers)
            pool.staged_offers.update((offer.key, offer) for offer in offers)
            actions.append(
                StoreBlocks(
                    move_id=self._last_move_id,
                    source=source,
                    target=pool.number,
                    offers=move.offers,
                    priority=_urgency(source, pool),
                )
            )

    def _release_source(
        self, source: int, keys: Sequence[BlockKey], actions: list[Action], reason: str
    ) -> None:
        """No move reads these blocks of the source any longer."""
        if source == DEVICE:
            for key in keys:
                self.holds.done(key)
            return
        pool = self._pools[source]
        leaving = [key for key in keys if key in pool.moving_down]  # others were only copied
        pool.moving_down.difference_update(leaving)
        actions += self.index.unpin(pool, keys)
        actions += self.index.unpublish(pool, leaving, reason)

    def _refused(self, pool: TierBlockPool, waiting: Waiting, reason: str) -> None:
        count(self._edge(waiting.source, pool.number).not_admitted, reason)
        if reason not in {"present", "being stored"}:
            fate = f"not taken by {pool.spec.name}: {reason}"
            self.index.fates.note(waiting.offer.key, fate)

    def _edge(self, source: int, target: int) -> EdgeCounts:
        edge = self.edges.get((source, target))
        if edge is None:
            edge = self.edges[source, target] = EdgeCounts()
        return edge


def _urgency(source: int, target: TierBlockPool) -> JobUrgency:
    if source > target.number:
        return JobUrgency.PREFETCH
    urgent = source != DEVICE or target.spec.write == "on_evict"
    return JobUrgency.MAKE_ROOM if urgent else JobUrgency.OFFLOAD


def _not_admitted(rules: AdmissionConfig, offer: BlockDescriptor, uses: int) -> str | None:
    """Why the rules refuse the block, or None. A few words without numbers: it names a counter."""
    if rules.prompt_only and not offer.facts.is_prompt:
        return "not part of a prompt"
    if rules.max_blocks is not None and offer.facts.depth >= rules.max_blocks:
        return "too deep in its chain"
    return "too few hits" if rules.min_hits > 1 and uses < rules.min_hits else None


def _importance(waiting: Waiting) -> Rank:
    """As ``rank_of``, of any priority."""
    return waiting.offer.facts.priority, not waiting.offer.facts.behind


class _Holds:
    """Device blocks that stores read. A key is held once for each of its offers."""

    def __init__(self) -> None:
        self._offers: dict[BlockKey, int] = {}
        self._stores: dict[BlockKey, int] = {}
        self._released: list[BlockKey] = []

    def __len__(self) -> int:
        return len(self._offers)

    def offered(self, key: BlockKey) -> None:
        self._offers[key] = self._offers.get(key, 0) + 1

    def needed(self, key: BlockKey) -> None:
        """One more store reads, or will read, the block."""
        self._stores[key] = self._stores.get(key, 0) + 1

    def done(self, key: BlockKey) -> None:
        """One store of the block ended."""
        left = self._stores.pop(key) - 1
        if left:
            self._stores[key] = left
        else:
            self._released += [key] * self._offers.pop(key)

    def release_idle(self, keys: Iterable[BlockKey]) -> None:
        """Release the blocks that no store reads."""
        for key in keys:
            if key in self._offers and key not in self._stores:
                self._released += [key] * self._offers.pop(key)

    def take_released(self) -> tuple[BlockKey, ...]:
        released, self._released = tuple(self._released), []
        return released

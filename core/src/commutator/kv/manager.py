"""The KV block manager: which blocks are kept in which tier. It decides; others move the bytes.

A pure state machine: it is told what happened and answers with actions, to be carried out in their
order. No I/O, no clock (``now_s`` is passed in; it must not run backwards), no threads.

    offer, device_evicting  --> StoreBlocks --> finish_store --> Announce, ReleaseSource
    begin_load (pins)       --> the blocks are read and verified --> finish_load
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from commutator.kv.actions import DEVICE, Action, FreeBlocks
from commutator.kv.admission import UseCounts, count_uses
from commutator.kv.break_even import PrefillSpeed
from commutator.kv.counters import EdgeStatistics, KvStatistics, TierState
from commutator.kv.index import BlockIndex
from commutator.kv.integrity import check_integrity
from commutator.kv.keys import BlockKey
from commutator.kv.load_result import LoadResult
from commutator.kv.loads import LoadPlan, LoadSide
from commutator.kv.offer import Offer
from commutator.kv.prefetch import prefetch
from commutator.kv.stores import StoreSide
from commutator.kv.tier import Stored
from commutator.kv.tier_book import TierBook, TierSpec
from commutator.kv.why import BlockWhy, explain

__all__ = ["KvManager"]


class KvManager:
    """The blocks of one engine over its tiers, fastest first.

    ``most_waiting`` blocks may wait for room in each tier. A tier whose loads were slower than
    computing is tried again after ``probe_interval_s``. What became of the last ``remembered``
    blocks is kept for ``why``, and how often they were used where an admission rule asks for it.
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
        self._books = [TierBook(number, spec) for number, spec in enumerate(tiers)]
        self._index = BlockIndex(self._books, remembered)
        counts = count_uses(spec.admission for spec in tiers)
        self._uses = UseCounts(remembered) if counts else None
        self._stores = StoreSide(self._index, self._uses, most_waiting)
        self._loads = LoadSide(self._index, self._uses, probe_interval_s)

    def recovered(self, tier: int, blocks: Iterable[Stored], now_s: float) -> list[Action]:
        """Blocks that a tier brought along when it was opened; what does not fit is freed."""
        book = self._books[tier]
        new, room = self._index.unknown(book, blocks), book.free
        actions = self._index.publish(book, new[:room], now_s)
        if over := tuple(offer.key for offer in new[room:]):
            actions.append(FreeBlocks(tier=tier, keys=over, reason="over capacity"))
        return self._settled(actions, now_s)

    def opened(
        self, tier: int, capacity: int, blocks: Sequence[Stored], now_s: float
    ) -> list[Action]:
        """A tier could not be used before, or was closed meanwhile; now it has these blocks."""
        book = self._books[tier]
        book.resize(capacity)
        actions: list[Action] = []
        if not book.spec.shared:
            there = {block.key for block in blocks}
            gone = [
                key
                for key, node in self._index.nodes.items()
                if node.published & book.bit and key not in there
            ]
            actions += self._index.unpublish(book, gone, "lost", free=False)
        return actions + self.recovered(tier, blocks, now_s)

    def found(self, tier: int, blocks: Sequence[Stored], now_s: float) -> list[Action]:
        """A shared tier was asked for blocks, and has these; older ones make room for them."""
        book = self._books[tier]
        new = self._index.unknown(book, blocks)
        actions = self._stores.make_room_now(book, new, now_s)
        room = book.free
        actions += self._index.publish(book, new[:room], now_s)
        if over := tuple(offer.key for offer in new[room:]):
            # What is read or being stored has the room; the tier has given slots to these, too.
            actions.append(FreeBlocks(tier=tier, keys=over, reason="over capacity"))
        return self._settled(actions, now_s)

    def match(self, keys: Sequence[BlockKey], first: int = 0) -> list[int]:
        """The fastest tier of each of the consecutive keys from ``first``; ends at a missing one.

        Tiers that are down do not count. Changes nothing.
        """
        return self._index.match(keys, first)

    def begin_load(
        self,
        load_id: str,
        keys: Sequence[BlockKey],
        first: int,
        now_s: float,
        *,
        prefill: PrefillSpeed,
    ) -> LoadPlan:
        """What to load of a prompt of which the device has the first ``first`` blocks.

        The plan's blocks stay where they are until ``finish_load``, which only a plan with blocks
        needs. Raises ValueError when a load of that id runs.
        """
        return self._loads.begin(load_id, keys, first, now_s, prefill)

    def finish_load(
        self,
        load_id: str,
        results: Mapping[BlockKey, LoadResult],
        now_s: float,
        *,
        seconds: Mapping[int, float] | None = None,
    ) -> list[Action]:
        """A load ended, or was cancelled: keys without a result were not read.

        ``seconds`` says how long the reading took, by tier, without the time spent in queues; the
        time since ``begin_load`` counts when it is not given and one tier was read. Raises
        ValueError for an unknown load.
        """
        actions = self._loads.finish(load_id, results, now_s, seconds)
        return self._settled(actions, now_s)

    def prefetch(self, keys: Sequence[BlockKey], first: int, now_s: float) -> list[Action]:
        """A prompt of which the device has ``first`` blocks will be asked for soon, perhaps.

        Its blocks come up to the fastest tier that is written to, if that is so configured.
        """
        return self._settled(prefetch(self._index, self._stores, keys, first, now_s), now_s)

    def offer(self, offers: Sequence[Offer], now_s: float) -> list[Action]:
        """The device has these blocks: computed, or used again. In the order of their chain.

        Written to every tier that is written through. Offers of blocks that are stored already
        count as uses, so offer what is reused, too; what was just loaded counts only once. Each
        offer's device block is held until a ``ReleaseSource`` names its key, maybe at once.
        """
        loaded = self._counted([offer.key for offer in offers])
        targets = [book for book in self._books if book.spec.write == "through"]
        return self._settled(self._stores.from_device(offers, targets, now_s, loaded), now_s)

    def used(self, keys: Iterable[BlockKey]) -> None:
        """The device has computed these blocks, or used them again, and offers none of them now.

        For engines that offer only what they evict: admission rules may ask how often.
        """
        self._counted(list(keys))

    def would_take(self, offers: Sequence[Offer]) -> set[BlockKey]:
        """Those that no tier has, and that ``device_evicting`` would store. Changes nothing."""
        stores, below = self._stores, self._stores.below(DEVICE)
        if below is None:
            return set()
        new = (offer for offer in offers if offer.key not in self._index.nodes)
        return {offer.key for offer in new if stores.refusal(below, offer) is None}

    def device_evicting(self, offers: Sequence[Offer], now_s: float) -> list[Action]:
        """The device wants to reuse these blocks; it may as soon as ``ReleaseSource`` names them.

        Written to the first tier that is up and written to, where that takes what is evicted.
        """
        below = self._stores.below(DEVICE)
        targets = [below] if below is not None else []
        return self._settled(self._stores.from_device(offers, targets, now_s), now_s)

    def finish_store(
        self,
        move_id: int,
        stored: Sequence[Stored],
        failed: Mapping[BlockKey, str],
        now_s: float,
    ) -> list[Action]:
        """A ``StoreBlocks`` ended; ``failed`` says why in a few words, which name a counter.

        Blocks in neither count as failed. Raises ValueError for an unknown move.
        """
        return self._settled(self._stores.finish(move_id, stored, failed, now_s), now_s)

    def lost(self, tier: int, keys: Iterable[BlockKey], reason: str, now_s: float) -> list[Action]:
        """The tier does not have these blocks any more."""
        actions = self._index.unpublish(self._books[tier], keys, reason, free=False)
        return self._settled(actions, now_s)

    def tier_down(self, tier: int, now_s: float) -> list[Action]:
        """No loads from and no stores to this tier; what it has stays known.

        Loads and moves that run are still to be finished.
        """
        book = self._books[tier]
        book.up = False
        self._index.up &= ~book.bit
        actions: list[Action] = []
        self._stores.refuse_waiting(book, list(book.waiting), "tier is down", actions)
        return self._settled(actions, now_s)

    def tier_up(self, tier: int, now_s: float) -> list[Action]:
        """The tier can be used again."""
        book = self._books[tier]
        book.up = True
        self._index.up |= book.bit
        return self._settled([], now_s)

    def evict(
        self,
        now_s: float,
        *,
        keys: Iterable[BlockKey] | None = None,
        tier: int | None = None,
        reason: str = "asked",
    ) -> list[Action]:
        """Remove blocks from one tier or all, whatever their retention. ``keys`` None: every one.

        What is being stored will not be published.
        """
        chosen = None if keys is None else list(keys)
        actions: list[Action] = []
        for book in self._books if tier is None else [self._books[tier]]:
            nodes = self._index.nodes
            those = list(nodes) if chosen is None else [key for key in chosen if key in nodes]
            book.doomed.update(key for key in those if nodes[key].staged & book.bit)
            waiting = book.waiting if chosen is None else [k for k in chosen if k in book.waiting]
            self._stores.refuse_waiting(book, list(waiting), reason, actions)
            actions += self._index.unpublish(book, those, reason)
        return self._settled(actions, now_s)

    def clear(self, now_s: float) -> list[Action]:
        """Remove everything from every tier."""
        return self.evict(now_s, reason="cleared")

    def why(self, keys: Sequence[BlockKey], now_s: float, first: int = 0) -> list[BlockWhy]:
        """For each block of a prompt: where it lies, and whether it would be reused or why not."""
        return explain(self._index, keys, first, now_s)

    def statistics(self) -> KvStatistics:
        """Everything there is to count."""
        stores = self._stores
        names = {DEVICE: "device"} | {book.number: book.spec.name for book in self._books}
        return KvStatistics(
            tiers=tuple(_state(book) for book in self._books),
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

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not balance. Linear in the number of blocks."""
        check_integrity(self._index, self._stores, self._loads)

    def _counted(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Count uses, but for those that count already as they were loaded; these are returned."""
        loaded = self._index.take_loaded(keys)
        if self._uses is not None:
            for key in keys:
                if key not in loaded:
                    self._uses.used(key)
        return loaded

    def _settled(self, actions: list[Action], now_s: float) -> list[Action]:
        self._stores.settle(now_s, actions)
        return actions + self._stores.take_released()


def _state(book: TierBook) -> TierState:
    cost = book.speed.cost
    return TierState(
        name=book.spec.name,
        medium=book.spec.medium,
        up=book.up,
        capacity=book.capacity,
        published=book.published,
        staged=book.staged,
        leaving=len(book.leaving),
        waiting=len(book.waiting),
        loading=len(book.pins),
        retained=book.retention.pinned,
        pins_refused=book.retention.pins_refused,
        loads=dict(book.counts.loads),
        not_loaded=dict(book.counts.not_loaded),
        removed=dict(book.counts.removed),
        prefetched=dict(book.counts.prefetched),
        latency_s=cost.latency_s if cost is not None else None,
        block_s=cost.block_s if cost is not None else None,
    )

"""The way of blocks into the tiers: admission, room, moves, and the release of their sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, islice

from attrs import frozen

from commutator.kv.actions import DEVICE, Action, FreeBlocks, ReleaseSource, StoreBlocks, Urgency
from commutator.kv.admission import UseCounts
from commutator.kv.counters import EdgeCounts, count
from commutator.kv.index import BlockIndex
from commutator.kv.keys import BlockKey
from commutator.kv.offer import Offer, holds_over
from commutator.kv.tier import Stored
from commutator.kv.tier_book import TierBook, Waiting

__all__ = ["Move", "StoreSide"]


@frozen
class Move:
    """Blocks on their way from one place to a tier."""

    source: int
    target: int
    offers: tuple[Offer, ...]


class StoreSide:
    """Keeps, for every move, what it takes from its source and what room it has in its target."""

    def __init__(self, index: BlockIndex, uses: UseCounts | None, most_waiting: int) -> None:
        self.index = index
        self.moves: dict[int, Move] = {}
        self.holds = _Holds()
        self.edges: dict[tuple[int, int], EdgeCounts] = {}
        self._books = index.books
        self._uses = uses
        self._most_waiting = most_waiting
        self._last_move_id = 0

    def from_device(
        self,
        offers: Sequence[Offer],
        targets: Iterable[TierBook],
        now_s: float,
        loaded: Collection[BlockKey] = (),
    ) -> list[Action]:
        """The device has these blocks; its copies are held until no store reads them.

        Those in ``loaded`` were touched when they were loaded.
        """
        actions: list[Action] = []
        for offer in offers:
            self.holds.offered(offer.key)
            self._ask_meanwhile(offer)
        spared = {offer.key for offer in offers} | {offer.parent for offer in offers}
        for book in targets:
            for offer in self._new(book, offers, now_s, loaded):
                self.enqueue(book, offer, DEVICE, now_s, actions, spared)
        self.settle(now_s, actions, spared)
        self.holds.release_idle(offer.key for offer in offers)
        return actions

    def finish(
        self, move_id: int, stored: Sequence[Stored], failed: Mapping[BlockKey, str], now_s: float
    ) -> list[Action]:
        """A move ended; what is in neither ``stored`` nor ``failed`` counts as failed."""
        move = self.moves.pop(move_id, None)
        if move is None:
            raise ValueError(f"there is no move {move_id}: it was finished, or never asked for")
        book, edge = self._books[move.target], self._edge(move.source, move.target)
        written = {block.key for block in stored}
        actions: list[Action] = []
        good: list[Offer] = []
        doomed: list[BlockKey] = []
        bad: list[BlockKey] = []
        for offer in move.offers:
            key = offer.key
            coming = book.coming.pop(key)
            if key in written and key not in book.doomed:
                good.append(coming)
                node = self.index.nodes[key]
                if holds_over(coming.facts, node.offer.facts):
                    node.offer = coming
                continue
            if key in written:
                doomed.append(key)
            else:
                bad.append(key)
                reason = failed.get(key, "not reported")
                count(edge.failed, reason)
                self.index.fates.note(key, f"not stored in {book.spec.name}: {reason}")
            self.index.unstage(book, key)
        edge.stored += len(good)
        if move.source > move.target:
            book.prefetched.update(offer.key for offer in good)
            count(book.counts.prefetched, "brought", len(good))
        actions += self.index.publish(book, good, now_s)
        if doomed:
            actions.append(FreeBlocks(tier=book.number, keys=tuple(doomed), reason="asked"))
        self._done_with(move.source, [offer.key for offer in good], actions, "moved down")
        self._done_with(move.source, doomed + bad, actions, "evicted")
        self.settle(now_s, actions)
        return actions

    def refuse_waiting(
        self, book: TierBook, keys: Iterable[BlockKey], reason: str, actions: list[Action]
    ) -> None:
        """Give up what was waiting for room in a tier."""
        for key in keys:
            waiting = book.waiting.pop(key)
            book.quota.gone(key)
            self._refused(book, waiting, reason)
            self._done_with(waiting.source, [key], actions, "evicted")

    def settle(
        self, now_s: float, actions: list[Action], spared: Collection[BlockKey | None] = ()
    ) -> None:
        """Make room for what waits, from the fastest tier down, and start what has room."""
        for book in self._books:
            if book.waiting:
                self._make_room(book, now_s, actions, spared)
        for book in reversed(self._books):
            if book.waiting and book.free > 0:
                self._start(book, actions)

    def drop(
        self, book: TierBook, victims: Sequence[BlockKey], now_s: float, actions: list[Action]
    ) -> None:
        """Evict blocks: those that the next tier takes go there first."""
        below = None if book.spec.write == "never" else self.below(book.number)
        gone: list[BlockKey] = []
        for key in reversed(victims):  # the most valuable first, as in a chain
            offer = self.index.nodes[key].offer
            if below is not None and self.enqueue(below, offer, book.number, now_s, actions):
                book.pin(key)
                book.moving_down.add(key)
                book.retention.removed(key, evicted=True)
                book.quota.gone(key)
            else:
                gone.append(key)
        actions += self.index.unpublish(book, gone, "evicted")

    def make_room_now(self, book: TierBook, offers: Sequence[Offer], now_s: float) -> list[Action]:
        """Evict for blocks that the tier turned out to have, which were not known."""
        actions: list[Action] = []
        short = len(offers) - book.free
        if short > 0:
            near = {offer.key for offer in offers} | {offer.parent for offer in offers}
            pins = book.pins
            victims = book.retention.victims(
                short, lambda key: key not in pins and key not in near, now_s, 0
            )
            self.drop(book, victims, now_s, actions)
        return actions

    def below(self, number: int) -> TierBook | None:
        """The next tier that is up and written to, where it takes what the one above evicts."""
        lower = (book for book in self._books[number + 1 :] if book.spec.write != "never")
        book = next((book for book in lower if book.up), None)
        return book if book is not None and book.spec.write == "on_evict" else None

    def take_released(self) -> list[Action]:
        """The device blocks that may be reused since the last call."""
        keys = self.holds.take_released()
        return [ReleaseSource(keys=keys)] if keys else []

    def _ask_meanwhile(self, offer: Offer) -> None:
        """What is asked for a block on its way to a tier holds once it is there."""
        key = offer.key
        for book in self._books:
            waiting, coming = book.waiting.get(key), book.coming.get(key)
            if waiting is not None and holds_over(offer.facts, waiting.offer.facts):
                book.waiting[key] = Waiting(offer, waiting.source)
            if coming is not None and holds_over(offer.facts, coming.facts):
                book.coming[key] = offer

    def _new(
        self,
        book: TierBook,
        offers: Sequence[Offer],
        now_s: float,
        loaded: Collection[BlockKey],
    ) -> list[Offer]:
        """Those that the tier does not have; the others are used, the last of a chain first."""
        new: list[Offer] = []
        present = Counter[str]()
        for offer in reversed(offers):
            reason = self.index.presence(book, offer.key)
            if reason is None:
                new.append(offer)
                continue
            present[reason] += 1
            if reason == "present" and (offer.key not in loaded or not offer.facts.is_plain):
                node = self.index.nodes[offer.key]
                if holds_over(offer.facts, node.offer.facts):
                    node.offer = offer
                book.retention.asked(offer.key, offer.parent, offer.facts, now_s)
                book.quota.touched(offer.key)
        for reason, blocks in present.items():
            count(self._edge(DEVICE, book.number).not_admitted, reason, blocks)
        new.reverse()
        return new

    def enqueue(
        self,
        book: TierBook,
        offer: Offer,
        source: int,
        now_s: float,
        actions: list[Action],
        spared: Collection[BlockKey | None] = (),
    ) -> bool:
        """Let a block wait for room; False, and counted, when the tier does not take it."""
        waiting = Waiting(offer, source)
        if (reason := self.refusal(book, offer)) is not None:
            self._refused(book, waiting, reason)
            return False
        tenant = offer.facts.tenant
        if book.quota.enabled and book.quota.is_full(tenant):
            own = book.quota.oldest(tenant, lambda k: k not in book.pins and k not in spared)
            if own is None:
                self._refused(book, waiting, "tenant quota")
                return False
            self.drop(book, [own], now_s, actions)
        book.waiting[offer.key] = waiting
        book.quota.claim(offer.key, tenant)
        if source == DEVICE:
            self.holds.needed(offer.key)
        return True

    def refusal(self, book: TierBook, offer: Offer) -> str | None:
        """Why the tier does not take the block, or None."""
        if not book.up:
            return "tier is down"
        if (reason := self.index.presence(book, offer.key)) is not None:
            return reason
        if len(book.waiting) >= self._most_waiting:
            return "too many waiting"
        if not book.spec.admission:
            return None
        uses = self._uses[offer.key] if self._uses is not None else 0
        refusals = (rule.refusal(offer, uses) for rule in book.spec.admission)
        return next((reason for reason in refusals if reason is not None), None)

    def _make_room(
        self,
        book: TierBook,
        now_s: float,
        actions: list[Action],
        spared: Collection[BlockKey | None],
    ) -> None:
        short = len(book.waiting) - book.free - len(book.moving_down)
        if short <= 0:
            return
        # The last of the least important have to find victims, none more important than they are.
        ordered = sorted(book.waiting.values(), key=_by_importance)[-short:]
        pins = book.pins
        for importance, group in groupby(ordered, key=_by_importance):
            members = list(group)
            victims = book.retention.victims(
                len(members), lambda key: key not in pins and key not in spared, now_s, -importance
            )
            self.drop(book, victims, now_s, actions)
            without = [waiting.offer.key for waiting in members[len(victims) :]]
            self.refuse_waiting(book, without, "no room", actions)

    def _start(self, book: TierBook, actions: list[Action]) -> None:
        by_source: dict[int, list[Offer]] = {}
        for waiting in list(islice(book.waiting.values(), book.free)):
            del book.waiting[waiting.offer.key]
            by_source.setdefault(waiting.source, []).append(waiting.offer)
        for source, offers in by_source.items():
            self._last_move_id += 1
            move = Move(source, book.number, tuple(offers))
            self.moves[self._last_move_id] = move
            self.index.stage(book, offers)
            book.coming.update((offer.key, offer) for offer in offers)
            actions.append(
                StoreBlocks(
                    move_id=self._last_move_id,
                    source=source,
                    target=book.number,
                    offers=move.offers,
                    priority=_urgency(source, book),
                )
            )

    def _done_with(
        self, source: int, keys: Sequence[BlockKey], actions: list[Action], reason: str
    ) -> None:
        """Nothing reads these blocks of the source for a move any more."""
        if source == DEVICE:
            for key in keys:
                self.holds.done(key)
            return
        book = self._books[source]
        leaving = [key for key in keys if key in book.moving_down]  # others were only copied
        book.moving_down.difference_update(leaving)
        actions += self.index.unpin(book, keys)
        actions += self.index.unpublish(book, leaving, reason)

    def _refused(self, book: TierBook, waiting: Waiting, reason: str) -> None:
        count(self._edge(waiting.source, book.number).not_admitted, reason)
        if reason not in {"present", "being stored"}:
            fate = f"not taken by {book.spec.name}: {reason}"
            self.index.fates.note(waiting.offer.key, fate)

    def _edge(self, source: int, target: int) -> EdgeCounts:
        edge = self.edges.get((source, target))
        if edge is None:
            edge = self.edges[source, target] = EdgeCounts()
        return edge


def _urgency(source: int, target: TierBook) -> Urgency:
    if source > target.number:
        return Urgency.PREFETCH
    urgent = source != DEVICE or target.spec.write == "on_evict"
    return Urgency.MAKE_ROOM if urgent else Urgency.BACKGROUND


def _by_importance(waiting: Waiting) -> int:
    return -waiting.offer.facts.priority


class _Holds:
    """Device blocks that stores still read. A key is held once for each offer of it."""

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
        """One store less."""
        left = self._stores.pop(key) - 1
        if left:
            self._stores[key] = left
        else:
            self._released += [key] * self._offers.pop(key)

    def release_idle(self, keys: Iterable[BlockKey]) -> None:
        """Let go of what no store came to need."""
        for key in keys:
            if key in self._offers and key not in self._stores:
                self._released += [key] * self._offers.pop(key)

    def reads(self) -> dict[BlockKey, int]:
        """How many stores read, or will read, each block."""
        return dict(self._stores)

    def take_released(self) -> tuple[BlockKey, ...]:
        released, self._released = tuple(self._released), []
        return released

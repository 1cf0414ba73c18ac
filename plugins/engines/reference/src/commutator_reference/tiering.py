"""Keeps the engine's blocks in storage tiers, and brings them back before a prompt is computed.

On the engine's thread, all of it. The bytes are moved on the tiers' own threads meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from attrs import define, field

from commutator.kv import FinishedLoad, KvEvent, KvService, PrefillSpeed, count_uses
from commutator_reference.block_identity import BlockIdentity
from commutator_reference.blocks import BlockPool
from commutator_reference.look_ahead import LookAhead
from commutator_reference.sequence import Sequence
from commutator_reference.way_out import Offered, WayOut, offer_of

__all__ = ["Tiering"]

_LENT_SHARE = 0.25
"""Blocks of the arena that may be on their way to a tier at a time; others wait."""
_SPEED_FORGETTING = 0.8


@define
class _Load:
    sequence: Sequence
    first: int
    """Position of the first block that is loaded."""
    hits: list[int]
    """Blocks before it, held meanwhile."""
    blocks: list[int] = field(factory=list)
    returned: set[int] = field(factory=set)
    good: int | None = None
    """How many of ``blocks`` are verified, once that is known."""


class Tiering:
    """Between the scheduler's pool and the KV service."""

    def __init__(self, service: KvService, pool: BlockPool) -> None:
        self._service = service
        self._pool = pool
        self._on_evict = service.takes_evicted
        self._write_through = service.takes_computed
        self._counts_uses = count_uses(setup.admission for setup in service.tiers)
        self._loads: dict[int, _Load] = {}
        self._loading_blocks: dict[int, int] = {}
        """Device block to the key of the request that it is loaded for."""
        self._offers: dict[int, BlockIdentity] = {}
        """Blocks computed or used of which no tier was told yet, and what was in them."""
        self._way_out = WayOut(service, pool)
        self._lent = 0
        self._tokens_per_s: float | None = None
        self.look_ahead = LookAhead(service, pool)
        pool.has_tiers = True
        pool.on_registered = self._registered
        if self._counts_uses:
            pool.on_reused = self._used

    def ready(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether the request can be admitted; begins to load what is worth it."""
        if sequence.tiers_asked or not self._pool.prefix_caching:
            return True
        if (running := self._loads.get(sequence.key)) is not None:
            return running.good is not None
        block_size = self._pool.block_size
        wanted = (len(sequence.tokens) - 1) // block_size
        if wanted <= len(hits):
            return True
        keys = [sequence.identity(index, block_size).digest for index in range(wanted)]
        prefill = PrefillSpeed(tokens_per_s=self._tokens_per_s, block_size=block_size)
        load_id = str(sequence.key)
        count = self._service.plan(load_id, keys, len(hits), prefill)
        if count is None:
            return False
        sequence.tiers_asked = True
        if not count:
            return True
        for block in hits:
            self._pool.acquire(block)
        blocks = self._pool.allocate(count)
        if blocks is None:
            self._pool.release(hits)
            self._service.drop(load_id)
            return True
        self._loads[sequence.key] = _Load(sequence, len(hits), list(hits), blocks)
        self._loading_blocks.update(dict.fromkeys(blocks, sequence.key))
        self._service.start_load(load_id, blocks)
        sequence.tiers_asked = False
        return False

    def drop(self, key: int) -> None:
        """The request is gone; its blocks come back as the load ends."""
        self._service.drop(str(key))
        self.look_ahead.gone(key)

    def waiting(self, queue: Many[Sequence]) -> None:
        """Requests that were not admitted, the next one first."""
        self.look_ahead.waiting(
            sequence
            for sequence in queue
            if sequence.key not in self._loads and not sequence.tiers_asked
        )

    def held_blocks(self) -> set[int]:
        """Blocks that are held for loads."""
        hits = {block for load in self._loads.values() for block in load.hits}
        return hits | set(self._loading_blocks)

    @property
    def storing(self) -> bool:
        """Whether blocks are on their way to a tier, or wait for it."""
        return bool(self._lent or self._offers)

    def update(self) -> list[KvEvent]:
        """Once a step: take what was loaded and released, and offer what is new.

        Returns what routers are to be told of the tiers.
        """
        polled = self._service.poll()
        for block in polled.released:
            if (key := self._loading_blocks.get(block)) is not None:
                self._loads[key].returned.add(block)
            else:
                self._pool.take_back(block)
                self._way_out.came_back(block)
                self._lent -= 1
        for finished in polled.loads:
            self._finish(finished)
        for key in [key for key, load in self._loads.items() if load.good is not None]:
            self._give_back(key)
        self._offer()
        if self._on_evict:
            self._lend(self._way_out.take(self._room()), evicting=True)
        return polled.events

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens."""
        speed = tokens / seconds
        old = self._tokens_per_s
        keep = _SPEED_FORGETTING
        self._tokens_per_s = speed if old is None else keep * old + (1 - keep) * speed

    def _finish(self, finished: FinishedLoad) -> None:
        load = self._loads[int(finished.load_id)]
        load.good = finished.blocks
        block_size = self._pool.block_size
        for index in range(finished.blocks):
            identity = load.sequence.identity(load.first + index, block_size)
            twin = self._pool.find(identity)
            if twin is not None:
                # Another request computed it meanwhile. Held as long as those after it, it will not
                # be given away before them.
                self._pool.acquire(twin)
                load.hits.append(twin)
                continue
            block, facts = load.blocks[index], load.sequence.facts(load.first + index, block_size)
            self._pool.register(block, identity, facts)
            if facts.is_plain:
                self._way_out.is_kept(identity.digest)
            if self._counts_uses:
                # The load counted; what the request tells as it is admitted is the same use.
                self._offers.pop(block, None)
        load.sequence.tiers_asked = True

    def give_up(self) -> None:
        """The pool's books are broken: nothing is loaded or offered any more. See ``settled``."""
        self._offers.clear()
        self._loads = {key: load for key, load in self._loads.items() if load.good is None}
        for key in self._loads:
            self._service.drop(str(key))

    def settled(self) -> tuple[bool, list[KvEvent]]:
        """Whether no block of the arena is under way any more, and what routers are to be told.

        After ``give_up``, instead of ``update``: what comes back is counted, and that is all.
        """
        polled = self._service.poll()
        for block in polled.released:
            if self._loading_blocks.pop(block, None) is None:
                self._lent -= 1
        for finished in polled.loads:
            self._loads.pop(int(finished.load_id), None)
        return not (self._loading_blocks or self._lent or self._loads), polled.events

    def _give_back(self, key: int) -> None:
        """Let go of what came back; the prefix cache keeps what was registered."""
        load = self._loads[key]
        for block in reversed(load.blocks):
            if block in load.returned:
                self._pool.release([block])
                del self._loading_blocks[block]
        load.blocks = [block for block in load.blocks if block not in load.returned]
        load.returned.clear()
        self._pool.release(load.hits)
        load.hits = []
        if not load.blocks:
            del self._loads[key]

    def _registered(self, block: int, identity: BlockIdentity) -> None:
        self._way_out.is_new(identity.digest)
        if self._write_through or self._counts_uses:
            self._used(block, identity)

    def _used(self, block: int, identity: BlockIdentity) -> None:
        self._offers.pop(block, None)
        self._offers[block] = identity

    def _offer(self) -> None:
        if not self._write_through:
            self._tell_uses()
            return
        room = self._room()
        chosen: list[Offered] = []
        while self._offers and len(chosen) < room:
            block = next(iter(self._offers))
            identity = self._offers.pop(block)
            if self._pool.find(identity) == block:  # it may be gone by now
                chosen.append((offer_of(self._pool, block, identity), block))
        self._lend(chosen, evicting=False)

    def _tell_uses(self) -> None:
        """Nothing is offered before it goes, but how often it was used may decide then."""
        if self._offers:
            self._service.used([identity.digest for identity in self._offers.values()])
            self._offers.clear()

    def _room(self) -> int:
        """How many more blocks may be on their way to a tier."""
        return max(1, int(self._pool.num_blocks * _LENT_SHARE)) - self._lent

    def _lend(self, chosen: Many[Offered], *, evicting: bool) -> None:
        if not chosen:
            return
        offers = [offer for offer, _ in chosen]
        blocks = [block for _, block in chosen]
        for block in blocks:
            self._pool.lend(block)
        self._lent += len(blocks)
        (self._service.evicting if evicting else self._service.offer)(offers, blocks)

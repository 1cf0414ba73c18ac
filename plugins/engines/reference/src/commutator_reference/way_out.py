"""Which blocks a tier is to copy before the device gives them away; on the engine's thread."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import ceil

from commutator.kv import BlockKey, KvService, Offer
from commutator_reference.block_identity import BlockIdentity
from commutator_reference.blocks import BlockPool

__all__ = ["Offered", "WayOut", "offer_of"]

_DEMAND_FORGETTING = 0.999
_ASK_AGAIN_S = 0.25
"""What a tier did not take is asked for again so much later."""

Offered = tuple[Offer, int]
"""A block with its number on the device."""


class WayOut:
    """Looks so far ahead that what a step is given was copied in the steps before it.

    Blocks on their way to a tier are not given away: the next ones are, so these must be copies
    already. How far that is depends on how many blocks are given away while one is copied.
    """

    def __init__(
        self, service: KvService, pool: BlockPool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service = service
        self._pool = pool
        self._clock = clock
        self._asked: OrderedDict[BlockKey, float] = OrderedDict()
        """Keys that were offered or came from a tier, and when to look whether they are there."""
        self._begun: dict[int, int] = {}
        """Blocks that are being copied, and how many had been taken when that began."""
        self._taken = pool.taken
        self._demand = 0.0
        """Most blocks taken lately in a step, or while one was copied."""

    def is_kept(self, key: BlockKey) -> None:
        """The block came from a tier."""
        self._asked[key] = self._clock() + _ASK_AGAIN_S

    def is_new(self, key: BlockKey) -> None:
        """The block was computed, or more is asked for it: the tier is to be told."""
        self._asked.pop(key, None)

    def came_back(self, block: int) -> None:
        """A copy of the block is over."""
        if (begun := self._begun.pop(block, None)) is not None:
            self._demand = max(self._demand, self._pool.taken - begun)

    def take(self, room: int) -> list[Offered]:
        """Once a step: up to ``room`` blocks to offer now, the beginnings of chains first."""
        self._measure()
        ahead = 2 * ceil(self._demand) - self._pool.free
        room = min(room, self._spare())
        if ahead <= 0 or room <= 0:
            return []
        chosen = self._wanted(self._pool.oldest_cached(ahead))[:room]
        for offer, block in chosen:
            self._asked[offer.key] = self._clock() + _ASK_AGAIN_S
            self._begun[block] = self._pool.taken
        while len(self._asked) > 4 * self._pool.num_blocks:
            self._asked.popitem(last=False)
        return chosen[::-1]

    def _measure(self) -> None:
        taken, self._taken = self._pool.taken - self._taken, self._pool.taken
        if taken:
            self._demand = max(taken, self._demand * _DEMAND_FORGETTING)

    def _spare(self) -> int:
        """How many blocks the next step can do without: no request is to wait for a copy.

        Where even a step takes nearly all, half of them, or none would ever be copied.
        """
        available = self._pool.available
        return max(available - ceil(self._demand), available // 2)

    def _wanted(self, oldest: Sequence[tuple[int, BlockIdentity]]) -> list[Offered]:
        """Those that were not offered yet, or that no tier took and one would take now."""
        now_s, pool = self._clock(), self._pool
        due = [
            (offer_of(pool, block, identity), block)
            for block, identity in oldest
            if self._asked.get(identity.digest, now_s) <= now_s
        ]
        again = [offer for offer, _ in due if offer.key in self._asked]
        missed = self._service.would_take(again) if again else set()
        settled = {offer.key for offer in again} - missed
        self._asked.update(dict.fromkeys(settled, now_s + _ASK_AGAIN_S))
        return [(offer, block) for offer, block in due if offer.key not in settled]


def offer_of(pool: BlockPool, block: int, identity: BlockIdentity) -> Offer:
    """A registered block as tiers are offered it."""
    return Offer(
        key=identity.digest,
        parent=None if identity.is_first else identity.parent_digest,
        token_ids=identity.token_ids,
        facts=pool.facts(block),
        lora_name=identity.namespace.lora_name,
    )

"""Honours priority, TTL and pins of one tier's blocks, around the tier's eviction policy."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable

from attrs import define

from commutator.kv.eviction import EvictionPolicy
from commutator.kv.keys import BlockKey
from commutator.kv.offer import MAX_PRIORITY, PLAIN, BlockFacts, holds_over

__all__ = ["Retention"]

Evictable = Callable[[BlockKey], bool]


@define
class _Kept:
    """A block for which retention was asked."""

    facts: BlockFacts
    pinned: bool
    expires_s: float | None


class Retention:
    """Which block goes first: those whose TTL has passed, then by priority, then by policy.

    Pinned blocks are in no policy. Of pins that would fill more than ``most_pinned`` blocks
    nothing is left but their priority.
    """

    def __init__(self, policy: EvictionPolicy, most_pinned: int) -> None:
        self.pins_refused = 0
        self.pinned = 0
        self._fresh = copy.deepcopy(policy)
        self._policies = {0: policy}
        self._kept: dict[BlockKey, _Kept] = {}
        self._expiries: list[tuple[float, BlockKey]] = []
        self._most_pinned = most_pinned

    def resize(self, most_pinned: int) -> None:
        """From now on; what is pinned stays so."""
        self._most_pinned = most_pinned

    def added(
        self, key: BlockKey, parent: BlockKey | None, facts: BlockFacts, now_s: float
    ) -> None:
        if facts.is_plain:
            self._policies[0].added(key, parent, facts, now_s)
        else:
            self._keep(key, parent, facts, now_s)

    def touched(self, key: BlockKey, now_s: float) -> None:
        """The block was used: its TTL begins anew."""
        kept = self._kept.get(key)
        if kept is None:
            self._policies[0].touched(key, now_s)
            return
        if kept.facts.ttl_s is not None:
            kept.expires_s = now_s + kept.facts.ttl_s
        if not kept.pinned:
            self._policy(kept.facts).touched(key, now_s)

    def asked(
        self, key: BlockKey, parent: BlockKey | None, facts: BlockFacts, now_s: float
    ) -> None:
        """A block that is here was offered again: the stronger of two retentions holds."""
        kept = self._kept.get(key)
        expired = kept is not None and kept.expires_s is not None and kept.expires_s <= now_s
        if holds_over(facts, PLAIN if kept is None else kept.facts) or expired:
            self.removed(key, evicted=False)
            self.added(key, parent, facts, now_s)
        else:
            self.touched(key, now_s)

    def removed(self, key: BlockKey, *, evicted: bool) -> None:
        kept = self._kept.pop(key, None)
        if kept is None:
            self._policies[0].removed(key, evicted=evicted)
        elif kept.pinned:
            self.pinned -= 1
        else:
            self._policy(kept.facts).removed(key, evicted=evicted)

    def victims(
        self, count: int, evictable: Evictable, now_s: float, up_to_priority: int
    ) -> list[BlockKey]:
        """Up to ``count`` blocks to evict for one of that priority."""
        found = self._expired(count, evictable, now_s)
        chosen = set(found)
        for priority in sorted(self._policies):
            if len(found) >= count or priority > max(up_to_priority, -MAX_PRIORITY):
                break
            wanted = count - len(found)
            free = (lambda key: key not in chosen and evictable(key)) if chosen else evictable
            more = self._policies[priority].victims(wanted, free, now_s)
            found += more
            chosen.update(more)
        return found

    def reason_kept(self, key: BlockKey, now_s: float) -> str | None:
        """What keeps the block beyond its turn, in words."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        words = [f"priority {kept.facts.priority}"] if kept.facts.priority else []
        words += ["pinned"] if kept.pinned else []
        if kept.expires_s is not None:
            left_s = kept.expires_s - now_s
            words.append(f"for {left_s:.0f} s" if left_s > 0 else "TTL passed")
        return ", ".join(words)

    def _keep(
        self, key: BlockKey, parent: BlockKey | None, facts: BlockFacts, now_s: float
    ) -> None:
        pinned = facts.pinned and self.pinned < self._most_pinned
        self.pins_refused += facts.pinned and not pinned
        expires_s = None if facts.ttl_s is None else now_s + facts.ttl_s
        self._kept[key] = _Kept(facts, pinned, expires_s)
        if pinned:
            self.pinned += 1
        else:
            self._policy(facts).added(key, parent, facts, now_s)
        if expires_s is not None:
            heapq.heappush(self._expiries, (expires_s, key))
            if len(self._expiries) > 2 * len(self._kept) + 64:
                self._forget_stale_expiries()

    def _policy(self, facts: BlockFacts) -> EvictionPolicy:
        priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, facts.priority))
        if priority not in self._policies:
            self._policies[priority] = copy.deepcopy(self._fresh)
        return self._policies[priority]

    def _expired(self, count: int, evictable: Evictable, now_s: float) -> list[BlockKey]:
        found: dict[BlockKey, None] = {}
        again: list[tuple[float, BlockKey]] = []
        while self._expiries and self._expiries[0][0] <= now_s and len(found) < count:
            _, key = heapq.heappop(self._expiries)
            kept = self._kept.get(key)
            if kept is None or kept.expires_s is None:
                continue
            again.append((kept.expires_s, key))
            if kept.expires_s <= now_s and evictable(key):
                found[key] = None
        for entry in again:  # they leave the heap once they are gone
            heapq.heappush(self._expiries, entry)
        return list(found)

    def _forget_stale_expiries(self) -> None:
        live = {key: kept.expires_s for key, kept in self._kept.items()}
        self._expiries = [(at_s, key) for key, at_s in live.items() if at_s is not None]
        heapq.heapify(self._expiries)

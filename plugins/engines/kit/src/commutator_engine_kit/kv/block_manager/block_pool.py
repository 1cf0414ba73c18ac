"""The block pool of one tier: capacity, pins, retention, tenant quotas, speed and counters."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Literal

from attrs import Factory, define, evolve, frozen

from commutator.contract.block import (
    MAX_PRIORITY,
    PLAIN,
    BlockDescriptor,
    BlockKey,
    RetentionHints,
    supersedes,
)
from commutator.contract.eviction import EvictionPolicy
from commutator.contract.principal import SALT_SEPARATOR
from commutator.contract.tier import AdmissionConfig


@frozen(kw_only=True)
class LoadCost:
    """A load of n blocks takes ``latency_s + n * block_s``."""

    latency_s: float
    block_s: float

    def of(self, blocks: int) -> float:
        return self.latency_s + blocks * self.block_s if blocks else 0.0


@frozen(kw_only=True)
class TierSpec:
    """A tier's properties that the block manager needs."""

    name: str
    medium: str
    capacity_blocks: int
    shared: bool = False
    """Whether others write to the same medium."""
    eviction: Callable[[int], EvictionPolicy]
    """Makes a policy for a tier of the given number of blocks. Each priority has its own policy."""
    admission: AdmissionConfig = AdmissionConfig()
    write: Literal["through", "on_evict", "never"] = "through"
    """When a block is stored here. "through": once it is computed. "on_evict": before the next
    faster writable tier (for the first tier: the device) evicts it. "never": the tier is
    read-only."""
    prefetch: bool = True
    """Whether prefetches copy blocks here from slower tiers."""
    tenant_share: float | None = None
    """Largest part of the capacity that one tenant may fill, 0 to 1. None: all of it."""
    tenant_shares: Mapping[str, float] = Factory(dict)
    """The shares of tenants (cache salts) for which ``tenant_share`` does not apply."""


_MOST_PINNED = 0.5
"""Largest part of a tier's capacity that requests may pin."""

_MOST_REMEMBERED = 1 << 20
"""The capacity, in blocks, of the eviction policy of a tier without a limit."""


@frozen
class Waiting:
    """A block that waits for room in a tier."""

    offer: BlockDescriptor
    source: int


class TierBlockPool:
    """Capacity, pins and retention of one tier. ``used`` never exceeds the capacity."""

    def __init__(self, number: int, spec: TierSpec) -> None:
        self.number = number
        self.bit = 1 << number
        self.spec = spec
        self.capacity = spec.capacity_blocks
        self.up = True
        self.published = 0
        self.staged = 0
        self.leaving: dict[BlockKey, str] = {}
        """Removed blocks that are still read, each with its reason; freed after the last read."""
        self.moving_down: set[BlockKey] = set()
        """Published blocks to remove once they are stored one tier below."""
        self.prefetched: set[BlockKey] = set()
        """Published blocks that a prefetch stored, and that were not used since."""
        self.pins: dict[BlockKey, int] = {}
        self.cancelled: set[BlockKey] = set()
        """Staged blocks to free instead of publishing them once they are stored."""
        self.staged_offers: dict[BlockKey, BlockDescriptor] = {}
        """Staged blocks with the strongest retention among their offers, also later ones."""
        self.waiting: dict[BlockKey, Waiting] = {}
        remembered = min(spec.capacity_blocks, _MOST_REMEMBERED)
        self.retention = Retention(
            lambda: spec.eviction(remembered), int(_MOST_PINNED * spec.capacity_blocks)
        )
        self.quota = Quota(spec.capacity_blocks, spec.tenant_share, spec.tenant_shares)
        self.speed = LoadSpeed()
        self.counts = TierCounts()

    def resize(self, capacity: int) -> None:
        """Set the capacity, which is known once the tier is open."""
        self.capacity = max(capacity, self.used)
        self.retention.most_pinned = int(_MOST_PINNED * self.capacity)
        self.quota.capacity = self.capacity

    @property
    def used(self) -> int:
        """Blocks that occupy room."""
        return self.published + self.staged + len(self.leaving)

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def touched(self, key: BlockKey, now_s: float) -> None:
        """A published block was used."""
        self.retention.touched(key, now_s)
        self.quota.touched(key)

    def pin(self, key: BlockKey) -> None:
        """A load or a move reads the block."""
        self.pins[key] = self.pins.get(key, 0) + 1

    def unpin(self, key: BlockKey) -> bool:
        """A reader ended. Returns whether it was the last."""
        left = self.pins[key] - 1
        if left:
            self.pins[key] = left
        else:
            del self.pins[key]
        return not left


class Quota:
    """Counts each tenant's blocks in the tier, including those on their way to it.

    A tenant is a cache salt, of a principal's requests the part that is the principal's, so that
    no fresh salt gives it more; blocks without one have no limit. A tenant at its limit loses its
    own least recently used block for each new one, whatever the tier's eviction policy.
    """

    def __init__(
        self, capacity_blocks: int, share: float | None, shares: Mapping[str, float]
    ) -> None:
        self.capacity = capacity_blocks
        """To which the shares apply, in blocks."""
        self._share = share
        self._shares = dict(shares)
        self.enabled = share is not None or bool(shares)
        self._counts: dict[str, int] = {}
        self._orders: dict[str, OrderedDict[BlockKey, None]] = {}
        self._tenants: dict[BlockKey, str] = {}

    def is_full(self, tenant: str | None) -> bool:
        """Whether the tenant has as many blocks as it may have."""
        tenant = _owner(tenant)
        share = self._shares.get(tenant, self._share) if tenant is not None else None
        if tenant is None or share is None:
            return False
        return self._counts.get(tenant, 0) >= int(share * self.capacity)

    def claim(self, key: BlockKey, tenant: str | None) -> None:
        """Count a block of the tenant that is on its way to the tier."""
        tenant = _owner(tenant)
        if self.enabled and tenant is not None:
            self._tenants[key] = tenant
            self._counts[tenant] = self._counts.get(tenant, 0) + 1

    def stored(self, key: BlockKey) -> None:
        """A claimed block was stored."""
        if self.enabled and (tenant := self._tenants.get(key)) is not None:
            self._orders.setdefault(tenant, OrderedDict())[key] = None

    def touched(self, key: BlockKey) -> None:
        if self.enabled and (tenant := self._tenants.get(key)) is not None:
            order = self._orders.get(tenant)
            if order is not None and key in order:
                order.move_to_end(key)

    def gone(self, key: BlockKey) -> None:
        """A block was removed, or will be, or was not stored: it counts no longer."""
        if self.enabled and (tenant := self._tenants.pop(key, None)) is not None:
            order = self._orders.get(tenant, OrderedDict())
            order.pop(key, None)
            if not order:
                self._orders.pop(tenant, None)
            self._counts[tenant] -= 1
            if not self._counts[tenant]:
                del self._counts[tenant]

    def oldest(self, tenant: str | None, evictable: Callable[[BlockKey], bool]) -> BlockKey | None:
        """The tenant's least recently used block that may be evicted."""
        tenant = _owner(tenant)
        order = self._orders.get(tenant, ()) if tenant is not None else ()
        return next((key for key in order if evictable(key)), None)


def _owner(salt: str | None) -> str | None:
    """The principal's part of a salt, or all of it where no principal has a part."""
    return None if salt is None else salt.partition(SALT_SEPARATOR)[0]


Evictable = Callable[[BlockKey], bool]


@define
class _Retained:
    """A block with retention hints."""

    facts: RetentionHints
    pinned: bool
    expires_s: float | None


Rank = tuple[int, bool]
"""Priority, and whether the block is of use to what continues its prompt; the least goes first."""
_LEAST: Rank = (-MAX_PRIORITY, True)


def rank_of(facts: RetentionHints) -> Rank:
    """The rank of a block with these hints."""
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, facts.priority)), not facts.behind


@frozen
class _Behind:
    parent: BlockKey | None
    facts: RetentionHints


class Retention:
    """The order of eviction: blocks with an expired TTL, then by rank, then by policy.

    A block's rank is its priority, and within that, blocks ``behind`` the end of their prompt come
    first, until one is used: then a prompt has branched off there, and others may. Pinned blocks
    are in no policy. A pin beyond ``most_pinned`` blocks is refused: the block has only its
    priority.
    """

    def __init__(self, make_policy: Callable[[], EvictionPolicy], most_pinned: int) -> None:
        self.pins_refused = 0
        self.pinned = 0
        self._make_policy = make_policy
        self._policies = {rank_of(PLAIN): make_policy()}
        self._plain = self._policies[rank_of(PLAIN)]
        self._behind: dict[BlockKey, _Behind] = {}
        """Plain blocks behind the end of their prompt that were not used since."""
        self._retained: dict[BlockKey, _Retained] = {}
        self._expiries: list[tuple[float, BlockKey]] = []
        self.most_pinned = most_pinned
        """The limit for new pins; pinned blocks stay pinned."""

    def added(
        self, key: BlockKey, parent: BlockKey | None, facts: RetentionHints, now_s: float
    ) -> None:
        if not facts.is_plain:
            self._retain(key, parent, facts, now_s)
            return
        if facts.behind:
            self._behind[key] = _Behind(parent, facts)
        self._policy(facts).added(key, parent, facts, now_s)

    def touched(self, key: BlockKey, now_s: float) -> None:
        """The block was used: its TTL starts again."""
        retained = self._retained.get(key)
        if retained is None:
            if (behind := self._behind.pop(key, None)) is None:
                self._plain.touched(key, now_s)
            else:
                self._policy(behind.facts).removed(key, evicted=False)
                self._plain.added(key, behind.parent, evolve(behind.facts, behind=False), now_s)
            return
        if retained.facts.ttl_s is not None:
            retained.expires_s = now_s + retained.facts.ttl_s
        if not retained.pinned:
            self._policy(retained.facts).touched(key, now_s)

    def offered_again(
        self, key: BlockKey, parent: BlockKey | None, facts: RetentionHints, now_s: float
    ) -> None:
        """A published block was offered again: the stronger of the two retentions applies."""
        retained = self._retained.get(key)
        expired = (
            retained is not None and retained.expires_s is not None and retained.expires_s <= now_s
        )
        if supersedes(facts, PLAIN if retained is None else retained.facts) or expired:
            self.removed(key, evicted=False)
            self.added(key, parent, facts, now_s)
        elif key not in self._behind or not facts.behind:
            self.touched(key, now_s)

    def is_behind(self, key: BlockKey) -> bool:
        """Whether the block counts as behind the end of its prompt."""
        return key in self._behind

    def removed(self, key: BlockKey, *, evicted: bool) -> None:
        retained = self._retained.pop(key, None)
        if retained is None:
            behind = self._behind.pop(key, None)
            policy = self._plain if behind is None else self._policy(behind.facts)
            policy.removed(key, evicted=evicted)
        elif retained.pinned:
            self.pinned -= 1
        else:
            self._policy(retained.facts).removed(key, evicted=evicted)

    def victims(
        self, count: int, evictable: Evictable, now_s: float, up_to: Rank
    ) -> list[BlockKey]:
        """Up to ``count`` blocks to evict for a block of the rank ``up_to``."""
        found = self._expired(count, evictable, now_s)
        chosen = set(found)
        for rank in sorted(self._policies):
            if len(found) >= count or rank > max(up_to, _LEAST):
                break
            wanted = count - len(found)
            free = (lambda key: key not in chosen and evictable(key)) if chosen else evictable
            more = self._policies[rank].victims(wanted, free, now_s)
            found += more
            chosen.update(more)
        return found

    def note(self, key: BlockKey, now_s: float) -> str | None:
        """The block's retention as text, or None."""
        retained = self._retained.get(key)
        if retained is None:
            return None
        notes = [f"priority {retained.facts.priority}"] if retained.facts.priority else []
        notes += ["pinned"] if retained.pinned else []
        if retained.expires_s is not None:
            left_s = retained.expires_s - now_s
            notes.append(f"for {left_s:.0f} s" if left_s > 0 else "TTL passed")
        return ", ".join(notes)

    def _retain(
        self, key: BlockKey, parent: BlockKey | None, facts: RetentionHints, now_s: float
    ) -> None:
        pinned = facts.pinned and self.pinned < self.most_pinned
        self.pins_refused += facts.pinned and not pinned
        expires_s = None if facts.ttl_s is None else now_s + facts.ttl_s
        self._retained[key] = _Retained(facts, pinned, expires_s)
        if pinned:
            self.pinned += 1
        else:
            self._policy(facts).added(key, parent, facts, now_s)
        if expires_s is not None:
            heapq.heappush(self._expiries, (expires_s, key))
            if len(self._expiries) > 2 * len(self._retained) + 64:
                self._forget_stale_expiries()

    def _policy(self, facts: RetentionHints) -> EvictionPolicy:
        rank = rank_of(facts)
        if rank not in self._policies:
            self._policies[rank] = self._make_policy()
        return self._policies[rank]

    def _expired(self, count: int, evictable: Evictable, now_s: float) -> list[BlockKey]:
        found: dict[BlockKey, None] = {}
        again: list[tuple[float, BlockKey]] = []
        while self._expiries and self._expiries[0][0] <= now_s and len(found) < count:
            _, key = heapq.heappop(self._expiries)
            retained = self._retained.get(key)
            if retained is None or retained.expires_s is None:
                continue
            again.append((retained.expires_s, key))
            if retained.expires_s <= now_s and evictable(key):
                found[key] = None
        for entry in again:  # removed from the heap once the blocks are removed
            heapq.heappush(self._expiries, entry)
        return list(found)

    def _forget_stale_expiries(self) -> None:
        live = {key: retained.expires_s for key, retained in self._retained.items()}
        self._expiries = [(at_s, key) for key, at_s in live.items() if at_s is not None]
        heapq.heapify(self._expiries)


_FORGETTING = 0.9
"""The weight of a measurement is multiplied by this at each later one."""

_SPREAD = 1e-3
"""Below this relative variance of batch sizes, latency cannot be separated from bandwidth."""


class LoadSpeed:
    """The cost of loads from one tier: a line fitted to the latest loads.

    Least squares over (blocks, seconds) with exponential forgetting; neither part is negative.
    """

    def __init__(self) -> None:
        self.cost: LoadCost | None = None
        """None before the first measurement."""
        self.measured_s: float | None = None
        """When a load was last measured."""
        self._weight = self._n = self._t = self._nn = self._nt = 0.0

    def measured(self, blocks: int, seconds: float, now_s: float) -> None:
        """``blocks`` were loaded together in ``seconds``."""
        if blocks < 1 or seconds < 0:
            return
        keep = _FORGETTING
        self._weight = self._weight * keep + 1
        self._n = self._n * keep + blocks
        self._t = self._t * keep + seconds
        self._nn = self._nn * keep + blocks * blocks
        self._nt = self._nt * keep + blocks * seconds
        self.cost = self._fitted()
        self.measured_s = now_s

    def _fitted(self) -> LoadCost:
        spread = self._weight * self._nn - self._n * self._n
        if spread <= _SPREAD * self._n * self._n:
            return LoadCost(latency_s=0.0, block_s=self._t / self._n)
        slope = (self._weight * self._nt - self._n * self._t) / spread
        if slope <= 0:
            return LoadCost(latency_s=self._t / self._weight, block_s=0.0)
        latency_s = (self._t - slope * self._n) / self._weight
        if latency_s <= 0:
            return LoadCost(latency_s=0.0, block_s=self._nt / self._nn)
        return LoadCost(latency_s=latency_s, block_s=slope)


_MOST_REASONS = 32
_OTHER = "other"


def count(counter: Counter[str], reason: str, blocks: int = 1) -> None:
    """Add ``blocks`` to a reason's counter. There are at most ``_MOST_REASONS`` reasons."""
    if blocks:
        known = reason in counter or len(counter) < _MOST_REASONS
        counter[reason if known else _OTHER] += blocks


@define
class TierCounts:
    """Since start, in blocks."""

    loads: Counter[str] = Factory(Counter)
    """By outcome: "loaded", "missing", "corrupt", "failed", "not run"."""
    not_loaded: Counter[str] = Factory(Counter)
    """Found here but not loaded, by reason."""
    removed: Counter[str] = Factory(Counter)
    """By reason: "evicted", "moved down", "corrupt", "lost", ..."""
    prefetched: Counter[str] = Factory(Counter)
    """"brought" from a slower tier by a prefetch; of these, later "used", or removed "unused"."""


@define
class EdgeCounts:
    """From one source to one tier since start, in blocks."""

    stored: int = 0
    not_admitted: Counter[str] = Factory(Counter)
    failed: Counter[str] = Factory(Counter)

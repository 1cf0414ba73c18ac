"""What the manager is told about a tier, and the books that it keeps of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from attrs import Factory, frozen

from commutator.kv.admission import AdmissionRule
from commutator.kv.break_even import LoadCost, LoadSpeed
from commutator.kv.counters import TierCounts
from commutator.kv.eviction import EvictionPolicy
from commutator.kv.keys import BlockKey
from commutator.kv.offer import Offer
from commutator.kv.quota import Quota
from commutator.kv.retention import Retention

__all__ = ["TierBook", "TierSpec", "Waiting"]


@frozen(kw_only=True)
class TierSpec:
    """One tier as the manager sees it."""

    name: str
    medium: str
    capacity_blocks: int
    shared: bool = False
    """Whether others write to the same medium."""
    eviction: EvictionPolicy
    """A fresh instance, for this tier only."""
    admission: Sequence[AdmissionRule] = ()
    write: Literal["through", "on_evict", "never"] = "through"
    """When a block goes here: once it is computed; when the next faster tier that is written to
    (the device, for the first) is about to forget it; or never, where it can only be read."""
    prefetch: bool = True
    """Whether blocks come here from slower tiers before they are asked for."""
    load_cost: LoadCost | None = None
    """A first guess; what is measured replaces it."""
    most_pinned: float = 0.5
    """Largest part of the capacity that requests may pin."""
    tenant_share: float | None = None
    """Largest part of the capacity that one tenant may fill; None: all of it."""
    tenant_shares: Mapping[str, float] = Factory(dict)
    """Tenants (cache salts) for which another share holds."""


@frozen
class Waiting:
    """A block that is to be stored once there is room."""

    offer: Offer
    source: int


class TierBook:
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
        """Blocks that go as soon as nobody reads them, and why."""
        self.moving_down: set[BlockKey] = set()
        """Published blocks that leave once they were stored one tier below."""
        self.prefetched: set[BlockKey] = set()
        """Published blocks that came before they were asked for, and were not used since."""
        self.pins: dict[BlockKey, int] = {}
        self.doomed: set[BlockKey] = set()
        """Staged blocks that must not be published any more."""
        self.coming: dict[BlockKey, Offer] = {}
        """Staged blocks with the most that was asked for them, also since their store began."""
        self.waiting: dict[BlockKey, Waiting] = {}
        self.retention = Retention(spec.eviction, int(spec.most_pinned * spec.capacity_blocks))
        self.quota = Quota(spec.capacity_blocks, spec.tenant_share, spec.tenant_shares)
        self.speed = LoadSpeed(spec.load_cost)
        self.counts = TierCounts()

    def resize(self, capacity: int) -> None:
        """The tier says only now how many blocks it has room for."""
        self.capacity = max(capacity, self.used)
        self.retention.resize(int(self.spec.most_pinned * self.capacity))
        self.quota.resize(self.capacity)

    @property
    def used(self) -> int:
        """Blocks that take up room."""
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
        """One reader less; whether it was the last."""
        left = self.pins[key] - 1
        if left:
            self.pins[key] = left
        else:
            del self.pins[key]
        return not left

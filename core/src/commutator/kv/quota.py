"""How much of one tier each tenant may fill, and which of its blocks goes when it wants more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from commutator.kv.keys import BlockKey

__all__ = ["Quota"]


class Quota:
    """Counts the blocks of each tenant that are, or will be, in the tier.

    A tenant is a cache salt; blocks without one are not limited. A tenant at its limit makes room
    with its own least recently used block, whatever the tier's eviction policy.
    """

    def __init__(
        self, capacity_blocks: int, share: float | None, shares: Mapping[str, float]
    ) -> None:
        self._capacity = capacity_blocks
        self._share = share
        self._shares = dict(shares)
        self.enabled = share is not None or bool(shares)
        self._counts: dict[str, int] = {}
        self._orders: dict[str, OrderedDict[BlockKey, None]] = {}
        self._tenants: dict[BlockKey, str] = {}

    def resize(self, capacity_blocks: int) -> None:
        """Shares are of this from now on."""
        self._capacity = capacity_blocks

    def limit(self, tenant: str | None) -> int | None:
        """In blocks; None without a limit."""
        share = self._shares.get(tenant, self._share) if tenant is not None else None
        return None if share is None else int(share * self._capacity)

    def is_full(self, tenant: str | None) -> bool:
        limit = self.limit(tenant)
        return tenant is not None and limit is not None and self._counts.get(tenant, 0) >= limit

    def claim(self, key: BlockKey, tenant: str | None) -> None:
        """A block of the tenant is on its way."""
        if self.enabled and tenant is not None:
            self._tenants[key] = tenant
            self._counts[tenant] = self._counts.get(tenant, 0) + 1

    def stored(self, key: BlockKey) -> None:
        """A claimed block is there."""
        if self.enabled and (tenant := self._tenants.get(key)) is not None:
            self._orders.setdefault(tenant, OrderedDict())[key] = None

    def touched(self, key: BlockKey) -> None:
        if self.enabled and (tenant := self._tenants.get(key)) is not None:
            order = self._orders.get(tenant)
            if order is not None and key in order:
                order.move_to_end(key)

    def gone(self, key: BlockKey) -> None:
        """A block left, is about to leave, or will not come; its room is given back."""
        if self.enabled and (tenant := self._tenants.pop(key, None)) is not None:
            order = self._orders.get(tenant, OrderedDict())
            order.pop(key, None)
            if not order:
                self._orders.pop(tenant, None)
            self._counts[tenant] -= 1
            if not self._counts[tenant]:
                del self._counts[tenant]

    def oldest(self, tenant: str | None, evictable: Callable[[BlockKey], bool]) -> BlockKey | None:
        """The tenant's own block that was not used for longest."""
        order = self._orders.get(tenant, ()) if tenant is not None else ()
        return next((key for key in order if evictable(key)), None)

"""The leases under which an exporter holds blocks for readers. No I/O; callers pass the time."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from attrs import define, field

from commutator_engine_kit.kv.transfer.protocol import ExportState, ExportUpdate, ReadyBlock

__all__ = ["LeaseTable"]

_REMEMBERED = 4096
"""Ended leases that are remembered, so that late questions get the right answer."""


@define
class _Lease:
    lease_s: float
    ends_s: float
    held: Counter[int] = field(factory=Counter)
    """How many times each block is held, in order of first use."""
    total: int = 0
    """Blocks ever held."""
    ready: list[ReadyBlock] = field(factory=list)
    complete: bool = False


class LeaseTable:
    """The leases of one exporter.

    A lease begins, holds blocks, publishes those that can be read, and ends once: released, failed
    or lapsed, whichever comes first. The call that ends it returns the blocks that it held. If the
    reader releases a lease before it begins, it never holds a block.
    """

    def __init__(self, most_blocks: int = sys.maxsize) -> None:
        """``most_blocks`` bounds what ``lend`` holds for all readers together."""
        self._most_blocks = most_blocks
        self._held = 0
        self._leases: dict[str, _Lease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Ids of ended leases with the reason, oldest first."""
        self.ends: Counter[str] = Counter()
        """Number of ended leases by how: "released", "failed", "lapsed"."""

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def held(self) -> list[int]:
        """Every held block, once for each time that it is held."""
        return [block for lease in self._leases.values() for block in lease.held.elements()]

    @property
    def room(self) -> int:
        """The number of further blocks that may be lent now."""
        return self._most_blocks - self._held

    def begin(self, lease_id: str, lease_s: float, now_s: float) -> bool:
        """Begin a lease. False when it has already ended. Raises ValueError when it has begun."""
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id} has begun already")
        if lease_id in self._ended:
            return False
        self._leases[lease_id] = _Lease(lease_s, now_s + lease_s)
        return True

    def hold(self, lease_id: str, blocks: Sequence[int]) -> bool:
        """Hold the prompt's next blocks. False when the lease has ended: nothing is held."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.held.update(blocks)
        lease.total += len(blocks)
        self._held += len(blocks)
        return True

    def publish(self, lease_id: str, blocks: Sequence[ReadyBlock]) -> None:
        """Mark the next held blocks as readable. Does nothing when the lease has ended."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.ready.extend(blocks)

    def complete(self, lease_id: str) -> None:
        """Declare that no more blocks will be held. Does nothing when the lease has ended."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.complete = True

    def lend(
        self, lease_id: str, blocks: Sequence[ReadyBlock], lease_s: float, now_s: float
    ) -> bool:
        """Begin and complete a lease, for a look-up. False, with nothing held, if already released.

        Raises ValueError when there is no ``room`` for the blocks, or the lease has begun already.
        """
        if len(blocks) > self.room:
            raise ValueError(f"{len(blocks)} blocks cannot be lent, with room for {self.room}")
        if not self.begin(lease_id, lease_s, now_s):
            return False
        self.hold(lease_id, [block.index for block in blocks])
        self.publish(lease_id, blocks)
        self.complete(lease_id)
        return True

    def watch(self, lease_id: str, have: int, now_s: float) -> ExportUpdate:
        """The readable blocks after the first ``have``; renews the lease."""
        lease = self._leases.get(lease_id)
        if lease is None:
            reason = self._ended.get(lease_id)
            if reason is None:
                return ExportUpdate(ExportState.UNKNOWN)
            return ExportUpdate(ExportState.FAILED, reason=reason)
        lease.ends_s = max(lease.ends_s, now_s + lease.lease_s)
        done = lease.complete and len(lease.ready) == lease.total
        state = ExportState.COMPLETE if done else ExportState.RUNNING
        return ExportUpdate(state, tuple(lease.ready[max(0, have) :]))

    def release(self, lease_id: str, blocks: Iterable[int] | None = None) -> list[int]:
        """Release these blocks, or the whole lease, for its reader.

        Returns the blocks that the lease held. It ends with its last block.
        """
        lease = self._leases.get(lease_id)
        if blocks is None or lease is None:
            return self._end(lease_id, "released", "the reader had released it")
        released = [block for block in dict.fromkeys(blocks) if block in lease.held]
        for block in released:
            lease.held[block] -= 1
            if not lease.held[block]:
                del lease.held[block]
        self._held -= len(released)
        if not lease.held:
            self._end(lease_id, "released", "the reader had released it")
        return released

    def fail(self, lease_id: str, reason: str) -> list[int]:
        """End the lease: its prefill was aborted, or failed."""
        return self._end(lease_id, "failed", reason)

    def expire(self, now_s: float) -> list[int]:
        """End the leases that have lapsed."""
        lapsed = [
            (each, lease.lease_s) for each, lease in self._leases.items() if lease.ends_s <= now_s
        ]
        freed: list[int] = []
        for lease_id, lease_s in lapsed:
            freed += self._end(lease_id, "lapsed", f"its reader asked nothing for {lease_s:g} s")
        return freed

    def end_all(self, reason: str) -> list[int]:
        """Call ``fail`` for every lease."""
        return [block for lease_id in list(self._leases) for block in self.fail(lease_id, reason)]

    def _end(self, lease_id: str, how: str, reason: str) -> list[int]:
        lease = self._leases.pop(lease_id, None)
        if lease_id not in self._ended:
            self._ended[lease_id] = reason
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        if lease is None:
            return []
        self.ends[how] += 1
        held = list(lease.held.elements())
        self._held -= len(held)
        return held

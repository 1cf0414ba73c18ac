"""What the service is told about one tier, and the I/O that is made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from attrs import field, frozen

from commutator.errors import TierError
from commutator.kv.admission import AdmissionRule
from commutator.kv.arena import BlockArena
from commutator.kv.block_io import BlockIo
from commutator.kv.codec import Codec
from commutator.kv.direct_io import DirectIo
from commutator.kv.eviction import EvictionPolicy
from commutator.kv.frame import HEADER_BYTES
from commutator.kv.guards import (
    Bandwidth,
    BandwidthLimit,
    Breaker,
    BreakerIo,
    LastResort,
    RetryBudget,
    RetryIo,
)
from commutator.kv.scattered_arena import Arena
from commutator.kv.staged_io import StagedIo
from commutator.kv.staging import Staging
from commutator.kv.tier import UNBOUNDED, StorageTier
from commutator.kv.tier_book import TierSpec
from commutator.kv.tier_mover import LocalMover, TierMover
from commutator.transfer import Memory, TransferAgent

__all__ = ["TierSetup", "build_io", "slot_bytes"]

_CODEC_SLACK = 128
_REMEMBERED_BLOCKS = 1 << 20
"""What policies of an unbounded tier may remember."""


@frozen(kw_only=True)
class TierSetup:
    """One tier with everything that was configured for it."""

    name: str
    tier: StorageTier
    eviction: Callable[[int], EvictionPolicy]
    """Makes the policy for a tier of so many blocks."""
    admission: tuple[AdmissionRule, ...] = ()
    write_through: bool = True
    prefetch: bool = True
    tenant_share: float | None = None
    tenant_shares: Mapping[str, float] = field(factory=dict)
    codecs: tuple[Codec, ...] = ()
    load_timeout_s: float = 5.0
    store_timeout_s: float = 60.0
    max_attempts: int = 2
    retry_backoff_s: float = 0.02
    max_bytes_per_s: float | None = None
    in_flight_bytes: int = 32 << 20
    breaker: Breaker = field(factory=Breaker)
    wrap_io: Callable[[BlockIo], BlockIo] = lambda io: io
    """Put around the moves, within all that guards them: for faults on purpose, or to measure."""

    @property
    def framed(self) -> bool:
        """Whether stored bytes begin with a header."""
        return self.tier.framed or bool(self.codecs)

    @property
    def write(self) -> Literal["through", "on_evict", "never"]:
        """When blocks go there."""
        if not self.tier.writable:
            return "never"
        return "through" if self.write_through else "on_evict"

    @property
    def capacity(self) -> int:
        """In blocks; UNBOUNDED while the tier is not open and cannot say."""
        try:
            return self.tier.statistics().capacity
        except TierError:
            return UNBOUNDED

    def spec(self) -> TierSpec:
        """The same as the manager sees it; the tier was opened, if it could be."""
        capacity = self.capacity
        return TierSpec(
            name=self.name,
            medium=self.tier.medium,
            capacity_blocks=capacity,
            shared=self.tier.shared,
            eviction=self.eviction(min(capacity, _REMEMBERED_BLOCKS)),
            admission=self.admission,
            write=self.write,
            prefetch=self.prefetch,
            tenant_share=self.tenant_share,
            tenant_shares=self.tenant_shares,
        )

    def is_direct(self, arena: Arena) -> bool:
        """Whether blocks of ``arena`` go to the tier without scratch memory."""
        if not isinstance(arena, BlockArena):
            return False
        alignment = self.tier.alignment_bytes
        aligned = arena.address % alignment == 0 and arena.block_bytes % alignment == 0
        return arena.memory is Memory.DRAM and aligned and not self.framed


def slot_bytes(setup: TierSetup, block_bytes: int) -> int:
    """The most that one stored block can take: header, and what codecs may add."""
    if not setup.framed:
        return block_bytes
    overhead = sum(codec.overhead_bytes for codec in setup.codecs)
    return HEADER_BYTES + block_bytes + block_bytes // _CODEC_SLACK + overhead


def build_io(
    setup: TierSetup,
    agents: Sequence[TransferAgent],
    arena: Arena,
    staging: Staging,
    budget: RetryBudget,
    bandwidth: Bandwidth | None,
) -> tuple[BlockIo, TierMover]:
    """The tier's I/O for blocks of ``arena``, in all its wrappers; ``agents`` share the moves.

    From the inside: the moves, retries, the breaker, the bandwidth limit, the last resort.
    ``budget`` and ``bandwidth`` are the tier's, whatever arena its blocks come from.
    """
    io: BlockIo
    if setup.is_direct(arena):
        mover = TierMover(agents, setup.tier, arena.memory, in_flight_bytes=setup.in_flight_bytes)
        io = DirectIo(mover)
    else:
        mover = TierMover(agents, setup.tier, Memory.DRAM, in_flight_bytes=setup.in_flight_bytes)
        local = LocalMover(agents[0], arena)
        io = StagedIo(mover, local, staging, framed=setup.framed, codecs=setup.codecs)
    io = RetryIo(
        setup.wrap_io(io),
        max_attempts=setup.max_attempts,
        backoff_s=setup.retry_backoff_s,
        budget=budget,
    )
    io = BreakerIo(io, setup.breaker)
    if bandwidth is not None:
        io = BandwidthLimit(io, bandwidth)
    return LastResort(io, setup.name), mover
